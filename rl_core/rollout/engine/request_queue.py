"""Requests that are under way in vLLM's engine in this process: decoded together, step by step, in an event loop."""

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

# Ranks wait for each other's commands as long as nobody asks for anything; a lost one is noticed at once.
IDLE = timedelta(days=30)


@dataclass
class Request:
    """A request under way, then vLLM's output for it, with the weights' version of each of its tokens."""

    number: str
    versions: list[int] = field(default_factory=list)
    result: asyncio.Future[None] | None = None
    output: RequestOutput | None = None

    def sampled(self, tokens: int, version: int) -> None:
        """Notes that there are `tokens` tokens now and that the newest of them came from `version`."""
        self.versions += [version] * (tokens - len(self.versions))


class Requests:
    """All requests of an engine; the ranks of a tensor-parallel engine take the same steps, which the first one tells.

    A step blocks the event loop for the time of one token; between steps everything else in the loop has its turn.
    """

    def __init__(self, engine: LLMEngine, tensor_parallel_size: int, room: int) -> None:
        """vLLM gets at most `room` requests at a time, one less than it can hold: some of its versions keep the places
        of those that a push interrupts, and what `run_now` asks for needs one."""
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
        """Whether another rank of the engine says what to do."""
        return self._group is not None and dist.get_rank() != self._first

    async def run(self, token_ids: list[int], params: SamplingParams, adapter: LoRARequest | None) -> Request:
        """The request with its output; cancelling the call frees it."""
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
        """vLLM's output for a request that is decoded before this returns, beside those under way."""
        request = self._new()
        self._commands.append(("add", request.number, token_ids, params, adapter, -1))
        while request.output is None:
            self._step()
        return request.output

    def pause(self) -> None:
        """No step is made until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Goes on with what is under way."""
        self._paused = False
        if self._under_way:
            self._start()

    def weights_changed(self, version: int) -> None:
        """From now on tokens come from `version`; what requests under way have read is read again, by its weights."""
        states: Any = self.engine.output_processor.request_states
        for request in self._under_way.values():
            if state := states.get(self._internal.get(request.number)):
                request.sampled(state.detokenizer.num_output_tokens(), self.version)
        if not self.engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("the rollout engine refused to clear its prefix cache")
        self.version = version

    async def follow(self) -> None:
        """Takes the steps that the engine's first rank takes, until that one says `end`."""
        while (commands := await asyncio.to_thread(self._broadcast, None)) is not None:
            self._apply(commands)
            self.engine.step()

    def end(self) -> None:
        """Lets the ranks that follow go."""
        if self._group is not None:
            self._broadcast(None)

    def _new(self) -> Request:
        request = Request(str(next(self._numbers)))
        self._under_way[request.number] = request
        return request

    def _forget(self, number: str) -> None:
        """Takes a request back, whether vLLM has it already or not."""
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
        except Exception as error:  # whatever ends the engine ends what waits for it
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
        """Sends the first rank's commands to the others; what they got."""
        message = [commands]
        dist.broadcast_object_list(message, src=self._first, group=self._group)
        return message[0]


def own_group(tensor_parallel_size: int) -> tuple[dist.ProcessGroup | None, int]:
    """The process group of the ranks that share this rank's engine, and the first of them; all ranks take part."""
    if tensor_parallel_size == 1:
        return None, 0
    mine, first = None, dist.get_rank() // tensor_parallel_size * tensor_parallel_size
    for start in range(0, dist.get_world_size(), tensor_parallel_size):
        group = dist.new_group(range(start, start + tensor_parallel_size), timeout=IDLE, backend="gloo")
        mine = group if start == first else mine
    return mine, first
