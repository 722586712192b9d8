"""Requests of an engine in this process: it decodes all of them together, step by step, in the event loop."""

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rl_core.rollout.engine.protocol import Sampling


@dataclass(eq=False)
class Request:
    """A turn to sample, and the weight version of each of its tokens."""

    token_ids: list[int]
    """The prompt."""
    seed: int
    sampling: Sampling
    versions: list[int] = field(default_factory=list)
    result: asyncio.Future[None] | None = None

    def sampled(self, tokens: int, version: int) -> None:
        """Records that the request has `tokens` tokens and that those not yet recorded were sampled by `version`."""
        self.versions += [version] * (tokens - len(self.versions))


R = TypeVar("R", bound=Request)


class RequestQueue(ABC, Generic[R]):
    """Unfinished requests of an engine.

    A step blocks the event loop for the duration of one token; other tasks of the loop run between steps.
    """

    def __init__(self, max_length: int) -> None:
        """`max_length` is the longest sequence in tokens."""
        self.version, self.max_length = -1, max_length
        self._under_way: set[R] = set()
        self._pump: asyncio.Task[None] | None = None
        self._paused = False

    async def run(self, request: R) -> R:
        """Runs a request and returns it finished; cancelling the call aborts it.

        Raises ValueError if the prompt is empty or leaves no room for a token.
        """
        if not 0 < len(request.token_ids) < self.max_length:
            raise ValueError(
                f"a prompt of {len(request.token_ids)} tokens; the rollout engine takes 1 to {self.max_length - 1}"
            )
        request.result = asyncio.get_running_loop().create_future()
        self._under_way.add(request)
        self._submit(request)
        self._start()
        try:
            await request.result
            return request
        except asyncio.CancelledError:
            if request in self._under_way:
                self._under_way.remove(request)
                self._abort(request)
            raise

    def pause(self) -> None:
        """Stops stepping until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Continues the running requests."""
        self._paused = False
        if self._under_way:
            self._start()

    @abstractmethod
    def _submit(self, request: R) -> None:
        """Takes a new request."""

    @abstractmethod
    def _abort(self, request: R) -> None:
        """Forgets a request, whether or not it is being decoded."""

    @abstractmethod
    def _step(self) -> None:
        """Samples one token of each decoded request; calls `_finish` for those that have ended."""

    @abstractmethod
    def _reset(self) -> None:
        """Forgets all requests, after an error."""

    def _finish(self, request: R) -> None:
        self._under_way.discard(request)
        if request.result and not request.result.done():
            request.result.set_result(None)

    def _start(self) -> None:
        if not self._paused and (self._pump is None or self._pump.done()):
            self._pump = asyncio.get_running_loop().create_task(self._steps())

    async def _steps(self) -> None:
        try:
            while self._under_way and not self._paused:
                self._step()
                await asyncio.sleep(0)
        except Exception as error:  # an engine error fails all requests
            lost, self._under_way = self._under_way, set()
            self._reset()
            for request in lost:
                if request.result and not request.result.done():
                    request.result.set_exception(error)
