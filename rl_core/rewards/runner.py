"""Scoring out of process, with a deadline that kills."""

from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Protocol

from pebble import ProcessExpired, ProcessPool

from rl_core.config.schema import RewardConfig
from rl_core.errors import TransientError
from rl_core.processes import PoolContext
from rl_core.rewards.code import code, warn_without_namespaces
from rl_core.rewards.judge import JUDGE, Judge, check_judge
from rl_core.rewards.scorers import Row, resolve_scorer
from rl_core.rewards.worker import RewardResult, failure, score_chunk, start

__all__ = ["RewardResult", "RewardRunner", "Scoring", "check_scorers"]

MAX_CHUNK = 64
CHUNKS_PER_PROCESS = 4
"""Chunks of a call for each process, so that an uneven one does not keep the others waiting."""
START_S = 60.0
"""Time that a replaced process has to come up before waiting for it is given up."""
MAX_RESTARTS = 3
"""Times that the pool is made anew in one call."""


def check_scorers(config: RewardConfig, sources: Mapping[str, str]) -> None:
    """Raises InputError when the scorer of any row does not exist or lacks a setting.

    `sources` says of each `data_source` of the rows where it is found.
    """
    where = {name: f"data_source of {place}, as reward.function is unset" for name, place in sources.items()}
    if config.function:
        where = {config.function: "reward.function"}
    scorers = [resolve_scorer(*item) for item in where.items()]
    if code in scorers:
        warn_without_namespaces()
    if JUDGE in where:
        check_judge(config.judge)


class Scoring(Protocol):
    """Whatever gives responses their scores."""

    def score(self, responses: list[str], rows: list[Row]) -> list[RewardResult]:
        """One result a response, in order; row i belongs to response i."""


class RewardRunner:
    """Scoring processes, up as soon as the runner is made and gone when it is closed.

    A response that its scorer fails on, or does not finish in `timeout_s`, gets a status and no score; the other
    responses are not affected.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self._judge = Judge(config.judge) if config.judge.url else None
        self._pool = self._new_pool()

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the scoring processes, whatever they are doing."""
        self._stop_pool()
        if self._judge:
            self._judge.close()

    def score(self, responses: list[str], rows: list[Row]) -> list[RewardResult]:
        """One result a response, in order; row i belongs to response i.

        Raises TransientError when the scoring processes themselves do not work.
        """
        if len(responses) != len(rows):
            raise ValueError(f"{len(responses)} responses for {len(rows)} rows")
        names = [self.config.function or row["data_source"] for row in rows]
        judged = [i for i, name in enumerate(names) if name == JUDGE]
        if judged and not self._judge:
            check_judge(self.config.judge)
        asked = self._judge.ask([responses[i] for i in judged], [rows[i] for i in judged]) if self._judge else []
        results = self._score_in_pool([i for i, name in enumerate(names) if name != JUDGE], names, responses, rows)
        if self._judge:
            results |= zip(judged, self._judge.answers(asked), strict=True)
        return [results[i] for i in range(len(rows))]

    def _score_in_pool(
        self, members: list[int], names: list[str], responses: list[str], rows: list[Row]
    ) -> dict[int, RewardResult]:
        results: dict[int, RewardResult] = {}
        pending: dict[Future[list[RewardResult]], list[int]] = {}
        waiting = _chunks(members, self.config.processes)
        restarts = 0
        while waiting or pending:
            if not self._pool.active:
                restarts += 1
                if restarts > MAX_RESTARTS:
                    raise TransientError(f"the scoring processes died {restarts} times within one call")
                self._stop_pool()
                self._pool = self._new_pool()
                waiting += pending.values()
                pending.clear()
            pending |= {self._submit(chunk, names, responses, rows): chunk for chunk in waiting}
            waiting = []
            patience = self.config.timeout_s + START_S
            done, _ = wait(pending, timeout=patience, return_when=FIRST_COMPLETED)
            if not done:
                raise TransientError(f"scoring waited {patience:.0f} s for {len(pending)} chunks and none ended")
            for future in done:
                scored, rest = self._outcome(future, pending.pop(future))
                results |= scored
                waiting += rest
        return results

    def _submit(
        self, members: list[int], names: list[str], responses: list[str], rows: list[Row]
    ) -> Future[list[RewardResult]]:
        chunk = [names[i] for i in members], [responses[i] for i in members], [rows[i] for i in members]
        # Half the time to begin responses in leaves each of them about the other half before the chunk is killed.
        args = (*chunk, self.config.timeout_s / 2)
        return self._pool.schedule(score_chunk, args=args, timeout=self.config.timeout_s)

    def _outcome(
        self, future: Future[list[RewardResult]], members: list[int]
    ) -> tuple[dict[int, RewardResult], list[list[int]]]:
        """Results that are known now, and the chunks to score (again) to know the others."""
        try:
            found = future.result()
        except BrokenProcessPool:
            return {}, [members]
        except TimeoutError:
            lost = failure("timeout", f"no score within reward.timeout_s={self.config.timeout_s:g} s")
        except ProcessExpired as error:
            lost = failure("error", f"the scoring process died with exit code {error.exitcode}")
        else:
            rest = members[len(found) :]
            return dict(zip(members, found, strict=False)), [rest] if rest else []
        if len(members) == 1:
            return {members[0]: lost}, []
        return {}, [[member] for member in members]  # one by one, so that only the guilty response is lost

    def _stop_pool(self) -> None:
        self._pool.stop()
        self._pool.join()

    def _new_pool(self) -> ProcessPool:
        pool = ProcessPool(
            max_workers=self.config.processes,
            initializer=start,
            initargs=(self.config.function,),
            context=PoolContext(),
        )
        if not pool.active:  # asking starts the processes
            raise TransientError("the scoring processes did not start")
        return pool


def _chunks(members: list[int], processes: int) -> list[list[int]]:
    size = max(1, min(MAX_CHUNK, -(-len(members) // (CHUNKS_PER_PROCESS * processes))))
    return [members[begin : begin + size] for begin in range(0, len(members), size)]
