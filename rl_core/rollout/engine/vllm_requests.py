"""Requests of the vLLM engine: in a tensor-parallel engine, its first rank broadcasts its steps to the others."""

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from vllm import RequestOutput, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from rl_core.rollout.engine.request_queue import Request, RequestQueue

IDLE = timedelta(days=30)
"""Timeout of follower ranks that wait for commands; a lost rank is noticed immediately, independent of this."""


@dataclass(eq=False, kw_only=True)
class VLLMRequest(Request):
    """A request with its number, what vLLM needs for it, and its output once finished."""

    params: SamplingParams
    adapter: LoRARequest | None
    number: str = ""
    output: RequestOutput | None = None


class VLLMRequests(RequestQueue[VLLMRequest]):
    """All requests of an engine."""

    def __init__(self, engine: LLMEngine, tensor_parallel_size: int, room: int, max_length: int) -> None:
        """`room` is the maximum number of concurrent requests, one less than vLLM's capacity: some vLLM versions keep
        the slots of requests preempted by a weight push, and `run_now` needs a free slot."""
        super().__init__(max_length)
        self.engine = engine
        self._by_number: dict[str, VLLMRequest] = {}
        self._waiting: deque[VLLMRequest] = deque()
        self._room = room
        self._internal: dict[str, str] = {}
        self._numbers = itertools.count()
        self._commands: list[tuple[Any, ...]] = []
        self._group, self._first = own_group(tensor_parallel_size)

    @property
    def is_follower(self) -> bool:
        """Whether this rank repeats the steps of the engine's first rank."""
        return self._group is not None and dist.get_rank() != self._first

    def run_now(self, request: VLLMRequest) -> RequestOutput:
        """Runs a request synchronously, alongside the running ones, and returns its output."""
        self._add(request, priority=-1)
        while request.output is None:
            self._step()
        return request.output

    def weights_changed(self, version: int) -> None:
        """Sets the version of the following tokens; running requests recompute their KV cache with the new weights."""
        states: Any = self.engine.output_processor.request_states
        for number, request in self._by_number.items():
            if state := states.get(self._internal.get(number)):
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

    def _submit(self, request: VLLMRequest) -> None:
        self._waiting.append(request)

    def _add(self, request: VLLMRequest, priority: int) -> None:
        request.number = str(next(self._numbers))
        self._by_number[request.number] = request
        self._commands.append(("add", request.number, request.token_ids, request.params, request.adapter, priority))

    def _abort(self, request: VLLMRequest) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
        elif self._by_number.pop(request.number, None):
            self._commands.append(("abort", request.number))
            self._room += 1

    def _reset(self) -> None:
        self._waiting.clear()
        for request in list(self._by_number.values()):
            self._abort(request)

    def _step(self) -> None:
        while self._waiting and self._room:
            self._add(self._waiting.popleft(), priority=0)
            self._room -= 1
        commands, self._commands = self._commands, []
        if self._group is not None:
            self._broadcast(commands)
        self._apply(commands)
        for output in cast(list[RequestOutput], self.engine.step()):
            request = self._by_number.pop(output.request_id, None)
            self._internal.pop(output.request_id, None)
            if request is None:
                continue
            self._room += request.result is not None
            request.output = output
            request.sampled(len(output.outputs[0].token_ids), self.version)
            self._finish(request)

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
