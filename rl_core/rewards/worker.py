"""What runs inside a scoring process; it imports nothing heavy, so that a killed process is soon replaced."""

import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from numbers import Real
from typing import Literal

from rl_core.processes import prepare_process, writable
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
    return RewardResult(None, status, writable(detail[-MAX_DETAIL:]))


def start(function: str | None) -> None:
    """Prepare the process: import the scorer of all rows, and end with the process that started this one."""
    prepare_process()
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
