"""What runs inside a scoring process; it imports nothing heavy, so that a killed process is soon replaced."""

import multiprocessing
import multiprocessing.context
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import isfinite
from numbers import Real
from typing import Literal

from rl_core.rewards.scorers import Row, resolve_scorer

Status = Literal["ok", "timeout", "error", "non_finite"]
MAX_DETAIL = 4000
"""Characters of an error's text that are kept: its end."""


@dataclass(frozen=True)
class RewardResult:
    """A response's score and further named rewards, or why it has none: then `score` is None and `detail` says what
    happened."""

    score: float | None
    status: Status
    detail: str = ""
    named: dict[str, float] = field(default_factory=dict)


def failure(status: Status, detail: str) -> RewardResult:
    """A result without a score; its detail can be written to any file."""
    return RewardResult(None, status, detail[-MAX_DETAIL:].encode("utf-8", "backslashreplace").decode())


def start(function: str | None) -> None:
    """Prepare the process: import the scorer of all rows, and end with the process that started this one."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if function:
        with suppress(Exception):  # reported with each response
            resolve_scorer(function)


def score_chunk(names: list[str], responses: list[str], rows: list[Row], budget_s: float) -> list[RewardResult]:
    """Results of the first responses: of all, or of those that were begun within the budget (at least one)."""
    end = time.monotonic() + budget_s
    results: list[RewardResult] = []
    for name, response, row in zip(names, responses, rows, strict=True):
        if results and time.monotonic() > end:
            break
        results.append(_score(name, response, row))
    return results


def _score(name: str, response: str, row: Row) -> RewardResult:
    try:
        value = resolve_scorer(name)(response, row)
        rewards = value if isinstance(value, dict) else {"score": value}
        if "score" not in rewards or not all(isinstance(reward, Real) for reward in rewards.values()):
            return failure("error", f"scorer '{name}' returned {value!r}, expected a float or a dict with 'score'")
        named = {str(key): float(reward) for key, reward in rewards.items()}
    except OverflowError:
        return failure("non_finite", traceback.format_exc())
    except BaseException:  # also SystemExit: whatever a scorer raises concerns its response only
        return failure("error", traceback.format_exc())
    if not all(isfinite(reward) for reward in named.values()):
        return failure("non_finite", f"scorer '{name}' returned {named}")
    return RewardResult(named.pop("score"), "ok", named=named)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


_MAIN = threading.Lock()
MAIN_NAMES = ("__spec__", "__file__")


@contextmanager
def _without_main() -> Iterator[None]:
    """Spawned processes import the parent's main module again; scoring needs none of it, and it may be heavy."""
    main = vars(sys.modules["__main__"])
    with _MAIN:
        hidden = {name: main[name] for name in MAIN_NAMES if name in main}
        main.update(dict.fromkeys(MAIN_NAMES))
        try:
            yield
        finally:
            for name in MAIN_NAMES:  # a main module without file has no such name, which others ask for
                del main[name]
            main.update(hidden)


class ScoringProcess(multiprocessing.context.SpawnProcess):
    """A spawned process that starts without the parent's main module."""

    def start(self) -> None:
        with _without_main():
            super().start()


class ScoringContext(multiprocessing.context.SpawnContext):
    """Context of scoring processes."""

    Process = ScoringProcess
