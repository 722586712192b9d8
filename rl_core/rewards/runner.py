"""Scores single responses in separate processes, which are killed at a deadline."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pebble import ProcessExpired

from rl_core.config.reward import RewardConfig, short_name
from rl_core.data.sources import NO_SOURCE
from rl_core.errors import InputError
from rl_core.rewards.code import code
from rl_core.rewards.judge import JUDGE, Judge, check_judge
from rl_core.rewards.programs import check_isolation
from rl_core.rewards.scorers import (
    Row,
    is_builtin,
    known_scorer,
    resolve_scorer,
    unknown_scorer,
    wants_trajectory,
)
from rl_core.rewards.worker import RewardResult, Status, failure, score_chunk, start, unreadable
from rl_core.runtime.process_pool import Processes

__all__ = ["RewardResult", "RewardRunner", "check_scorers", "scorer_of", "scorers_of"]

MAX_CHUNK = 64
CHUNKS_PER_PROCESS = 4
"""Waiting responses are split into this many chunks per process, so that one slow chunk delays little."""
CHUNKS_IN_FLIGHT = 2
"""Chunks submitted per process: one running and one queued."""


def scorer_of(config: RewardConfig, data_source: str, where: str = "data_source of a row") -> str:
    """Name of the scorer of the rows with this `data_source`: that of all rows, that of the source in the settings, or
    the built-in one with this name.

    Raises InputError for any other value: rows choose among scorers, but never name a function.
    """
    if config.function:
        return known_scorer(config.function) or config.function
    if chosen := config.by_source.get(data_source):
        return known_scorer(chosen) or chosen
    if scorer := known_scorer(data_source):
        return scorer
    if is_builtin(data_source):
        raise unknown_scorer(data_source, where)
    raise InputError(
        "the name of a scorer or source in data_source; rows cannot name functions",
        f"'{data_source[:200]}'",
        where,
        "if you trust the function, set reward.function=MODULE:FUNCTION for all rows, or "
        "reward.sources=[NAME=MODULE:FUNCTION] for the rows with this data_source",
    )


def scorers_of(config: RewardConfig, row: Row) -> list[str]:
    """Names of the row's scorer and of the extra scorers; raises the InputError of `scorer_of`."""
    return [scorer_of(config, row.get("data_source", NO_SOURCE)), *config.extra_weights]


def check_scorers(config: RewardConfig, sources: Mapping[str, str]) -> None:
    """Raises InputError if the scorer of any row, or one named by a setting, does not exist or lacks a setting, or if
    it runs programs and this machine does not allow their isolation.

    `sources` maps each `data_source` to the location of its rows, for error messages.
    """
    where = {config.function: "reward.function"} if config.function else {}
    where |= dict.fromkeys(config.by_source.values(), "reward.sources")
    where |= dict.fromkeys(config.extra_weights, "reward.extra_functions")
    for source, rows in sources.items():
        place = f"data_source of {rows} (reward.function is unset)"
        where.setdefault(scorer_of(config, source, place), place)
    scorers = [resolve_scorer(*item) for item in where.items()]
    if code in scorers:
        check_isolation(config.code.isolation)
    if JUDGE in where:
        check_judge(config.judge)


@dataclass(frozen=True)
class _Item:
    """One response for one scorer, with its result as a future."""

    name: str
    response: str
    row: Row
    trajectory: dict[str, Any] | None
    result: "asyncio.Future[RewardResult]"
    is_retry: bool = False
    """Whether a process died while scoring this item."""

    def settle(self, result: RewardResult) -> None:
        if not self.result.done():  # the caller may have been cancelled
            self.result.set_result(result)


class RewardRunner:
    """Scoring processes, alive from `start` to `close` or inside an asynchronous context manager.

    Waiting responses are sent to the processes in chunks: a single one immediately, many in few messages. If a scorer
    fails or exceeds `timeout_s`, the response gets a status and no score; other responses are not affected.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Raises InputError for invalid judge settings."""
        self.config, self.extra = config, config.extra_weights
        self._judge = Judge(config.judge) if config.judge.url else None
        names = (*((config.function,) if config.function else ()), *config.by_source.values(), *self.extra)
        settings = (names, config.memory_gb, config.code.isolation)
        self._processes = Processes(config.processes, config.timeout_s, start, settings, "scorers")
        self._waiting: deque[_Item] = deque()
        self._chunks: deque[list[_Item]] = deque()
        self._in_flight: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "RewardRunner":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Starts the processes; raises TransientError if they do not start."""
        await self._processes.start()

    async def close(self) -> None:
        """Kills the scoring processes, including running scorers."""
        await self._processes.close()
        if self._judge:
            self._judge.close()

    def reads_trajectory(self, row: Row) -> bool:
        """Whether any scorer of the row takes the trajectory as third argument; raises the InputError of `score`."""
        return any(map(wants_trajectory, scorers_of(self.config, row)))

    async def score(self, response: str, row: Row, trajectory: dict[str, Any] | None = None) -> RewardResult:
        """Score of the row's scorer plus weighted scores of the extra scorers; no score if any of them has none.

        `trajectory` is passed to the scorers that take it. Raises TransientError if the scoring processes themselves
        fail, InputError if the row has no scorer, or if it is a judge and none is configured.
        """
        scores = (self.score_by(name, response, row, trajectory) for name in scorers_of(self.config, row))
        total, *others = await asyncio.gather(*scores)
        seconds = total.seconds + sum(other.seconds for other in others)
        for (name, weight), other in zip(self.extra.items(), others, strict=True):
            total = _joined(total, other, name, weight)
        return replace(total, seconds=seconds)

    async def score_by(self, name: str, response: str, row: Row, trajectory: dict[str, Any] | None) -> RewardResult:
        """Result of one scorer, by its name; raises the errors of `score`."""
        if name == JUDGE:
            if not self._judge:
                check_judge(self.config.judge)
            assert self._judge
            return await self._judge.score(response, row)
        passed = trajectory if wants_trajectory(name) else None
        item = _Item(name, response, row, passed, asyncio.get_running_loop().create_future())
        self._waiting.append(item)
        self._send()
        return await item.result

    def _send(self) -> None:
        while (self._chunks or self._waiting) and len(self._in_flight) < CHUNKS_IN_FLIGHT * self.config.processes:
            task = asyncio.get_running_loop().create_task(self._work(self._next_chunk()))
            self._in_flight.add(task)
            task.add_done_callback(self._ended)

    def _next_chunk(self) -> list[_Item]:
        if self._chunks:
            return self._chunks.popleft()
        size = min(MAX_CHUNK, math.ceil(len(self._waiting) / (CHUNKS_PER_PROCESS * self.config.processes)))
        return [self._waiting.popleft() for _ in range(size)]

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._in_flight.discard(task)
        if not task.cancelled():
            self._send()

    async def _work(self, chunk: list[_Item]) -> None:
        """Settles the items of a chunk, or queues unfinished ones again."""
        begin, limit = time.monotonic(), self.config.timeout_s
        packed = [(item.name, item.response, item.row, item.trajectory) for item in chunk]
        try:
            # Responses start within half of the limit, so each has about the other half before the chunk is killed.
            results = await self._processes.run(score_chunk, packed, limit / 2)
        except TimeoutError:
            detail = f"scorer '{chunk[0].name}' gave no score within reward.timeout_s={limit:g} s"
            lost = _lost(chunk[0].name, "timeout", detail)
        except ProcessExpired as error:
            if not chunk[0].is_retry:  # retry once: the process may have been killed from outside, not by its scorer
                self._chunks.extend([replace(item, is_retry=True)] for item in chunk)
                return
            detail = f"the process of scorer '{chunk[0].name}' died with exit code {error.exitcode}"
            lost = _lost(chunk[0].name, "error", detail)
        except Exception as error:  # the pool itself failed
            for item in chunk:
                if not item.result.done():
                    item.result.set_exception(error)
            return
        else:
            for item, result in zip(chunk, results, strict=False):
                item.settle(result)
            if rest := chunk[len(results) :]:
                self._chunks.append(rest)
            return
        if len(chunk) == 1:
            chunk[0].settle(replace(lost, seconds=time.monotonic() - begin))
        else:  # rerun one by one, so that only the failing response loses its score
            self._chunks.extend([item] for item in chunk)


def _lost(name: str, status: Status, detail: str) -> RewardResult:
    """The result of a scorer that did not finish."""
    return unreadable(name, detail) if is_builtin(name) else failure(status, detail)


def _joined(result: RewardResult, other: RewardResult, name: str, weight: float) -> RewardResult:
    """The result with the weighted score of an extra scorer added."""
    if result.score is None or other.score is None:
        return result if result.score is None else other
    named = {**result.named, **other.named, short_name(name): other.score}
    reason = other if result.status == "ok" else result
    return replace(reason, score=result.score + weight * other.score, named=named)
