"""Request queue of the vLLM engine in this process: decodes all requests together, step by step, in an event loop."""

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from vllm import RequestOutput, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

IDLE = timedelta(days=30)
"""Timeout of follower ranks that wait for commands; a lost rank is noticed immediately, independent of this."""


@dataclass
class Request:
    """A request, its output once finished, and the weight version of each of its tokens."""

    number: str
    versions: list[int] = field(default_factory=list)
    result: asyncio.Future[None] | None = None
    output: RequestOutput | None = None

    def sampled(self, tokens: int, version: int) -> None:
        """Records that the request has `tokens` tokens and that those not yet recorded were sampled by `version`."""
        self.versions += [version] * (tokens - len(self.versions))


class Requests:
    """All requests of an engine; in a tensor-parallel engine, the first rank broadcasts its steps to the others.

    A step blocks the event loop for the duration of one token; other tasks of the loop run between steps.
    """

    def __init__(self, engine: LLMEngine, tensor_parallel_size: int, room: int) -> None:
        """`room` is the maximum number of concurrent requests, one less than vLLM's capacity: some vLLM versions keep
        the slots of requests preempted by a weight push, and `run_now` needs a free slot."""
        self.engine, self.version = engine, -1
        self._under_way: dict[str, Request] = {}
        self._waiting: deque[tuple[Any, ...]] = deque()
        self._room = room
        self._internal: dict[str, str] = {}
        self._numbers = itertools.count()
        self._commands: list[tuple[Any, ...]] = []
        self._pump: asyncio.Task[None] | None = None
        self._paused = False
        self._group, self._first = own_group(tensor_parallel_size)

    @property
    def is_follower(self) -> bool:
        """Whether this rank repeats the steps of the engine's first rank."""
        return self._group is not None and dist.get_rank() != self._first

    async def run(self, token_ids: list[int], params: SamplingParams, adapter: LoRARequest | None) -> Request:
        """Runs a request and returns it with its output; cancelling the call aborts it."""
        request = self._new()
        self._waiting.append(("add", request.number, token_ids, params, adapter, 0))
        request.result = asyncio.get_running_loop().create_future()
        self._start()
        try:
            await request.result
            return request
        except asyncio.CancelledError:
            if self._under_way.pop(request.number, None):
                self._forget(request.number)
            raise

    def run_now(self, token_ids: list[int], params: SamplingParams, adapter: LoRARequest | None) -> RequestOutput:
        """Runs a request synchronously, alongside the running ones, and returns its output."""
        request = self._new()
        self._commands.append(("add", request.number, token_ids, params, adapter, -1))
        while request.output is None:
            self._step()
        return request.output

    def pause(self) -> None:
        """Stops stepping until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Continues the running requests."""
        self._paused = False
        if self._under_way:
            self._start()

    def weights_changed(self, version: int) -> None:
        """Sets the version of the following tokens; running requests recompute their KV cache with the new weights."""
        states: Any = self.engine.output_processor.request_states
        for request in self._under_way.values():
            if state := states.get(self._internal.get(request.number)):
                request.sampled(state.detokenizer.num_output_tokens(), self.version)
        if not self.engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("the rollout engine refused to clear its prefix cache")
        self.version = version

    async def follow(self) -> None:
        """Repeats the steps of the engine's first rank until that rank calls `end`."""
        while (commands := await asyncio.to_thread(self._broadcast, None)) is not None:
            self._apply(commands)
            self.engine.step()

    def end(self) -> None:
        """Releases the follower ranks."""
        if self._group is not None:
            self._broadcast(None)

    def _new(self) -> Request:
        request = Request(str(next(self._numbers)))
        self._under_way[request.number] = request
        return request

    def _forget(self, number: str) -> None:
        """Removes a request, whether it is still waiting or already submitted to vLLM."""
        for command in self._waiting:
            if command[1] == number:
                self._waiting.remove(command)
                return
        self._commands.append(("abort", number))
        self._room += 1

    def _start(self) -> None:
        if not self._paused and (self._pump is None or self._pump.done()):
            self._pump = asyncio.get_running_loop().create_task(self._steps())

    async def _steps(self) -> None:
        try:
            while self._under_way and not self._paused:
                self._step()
                await asyncio.sleep(0)
        except Exception as error:  # an engine error fails all requests
            lost, self._under_way = self._under_way, {}
            for request in lost.values():
                if request.result and not request.result.done():
                    request.result.set_exception(error)

    def _step(self) -> None:
        commands, self._commands = self._commands, []
        while self._waiting and self._room:
            commands.append(self._waiting.popleft())
            self._room -= 1
        if self._group is not None:
            self._broadcast(commands)
        self._apply(commands)
        for output in cast(list[RequestOutput], self.engine.step()):
            request = self._under_way.pop(output.request_id, None)
            self._internal.pop(output.request_id, None)
            if request is None:
                continue
            self._room += request.result is not None
            request.output = output
            request.sampled(len(output.outputs[0].token_ids), self.version)
            if request.result and not request.result.done():
                request.result.set_result(None)

    def _apply(self, commands: list[tuple[Any, ...]]) -> None:
        for kind, number, *rest in commands:
            if kind == "add":
                token_ids, params, adapter, priority = rest
                prompt = TokensPrompt(prompt_token_ids=token_ids)
                self._internal[number] = self.engine.add_request(
                    number, prompt, params, lora_request=adapter, priority=priority
                )
            else:
                self.engine.abort_request([number])
                self._internal.pop(number, None)

    def _broadcast(self, commands: list[tuple[Any, ...]] | None) -> list[tuple[Any, ...]] | None:
        """Sends the first rank's commands to the other ranks; returns the commands on every rank."""
        message = [commands]
        dist.broadcast_object_list(message, src=self._first, group=self._group)
        return message[0]


def own_group(tensor_parallel_size: int) -> tuple[dist.ProcessGroup | None, int]:
    """Process group of the ranks that share this rank's engine, and its first rank; collective over all ranks."""
    if tensor_parallel_size == 1:
        return None, 0
    own, first = None, dist.get_rank() // tensor_parallel_size * tensor_parallel_size
    for start in range(0, dist.get_world_size(), tensor_parallel_size):
        group = dist.new_group(range(start, start + tensor_parallel_size), timeout=IDLE, backend="gloo")
        own = group if start == first else own
    return own, first
