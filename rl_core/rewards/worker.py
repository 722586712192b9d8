"""What runs inside a scoring process; it imports nothing heavy, so that a killed process is soon replaced."""

import io
import resource
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from numbers import Real
from typing import Any, Literal, TextIO

from rl_core.rewards.scorers import Row, resolve_scorer
from rl_core.runtime.process_pool import finished, prepare_process, writable

Packed = tuple[str, str, Row, dict[str, Any] | None]
"""A scorer's name and its arguments; a scorer of two arguments gets no trajectory."""
Status = Literal["ok", "timeout", "error", "non_finite"]
MAX_DETAIL = 4000
"""Characters of an error's text that are kept: its end."""
MAX_NAMED = 64
"""Named rewards that a scorer may give."""
MAX_PRINTED = 1_000_000
"""Characters that scorers may print in the life of their process."""


@dataclass(frozen=True)
class RewardResult:
    """A response's score and further named rewards, or why it has none: then `score` is None and `detail` says what
    happened."""

    score: float | None
    status: Status
    detail: str = ""
    named: dict[str, float] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)
    """That its scorers took, or that were waited for it."""


def failure(status: Status, detail: str) -> RewardResult:
    """A result without a score; its detail can be written to any file."""
    return RewardResult(None, status, writable(detail[-MAX_DETAIL:]))


class Printed(io.TextIOBase):
    """A stream that passes on what is printed, up to MAX_PRINTED characters: a scorer that prints each response would
    fill the disk with logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._left = stream, MAX_PRINTED

    def write(self, text: str) -> int:
        """Passes the text on while there is room."""
        if self._left > 0:
            self._stream.write(text[: self._left])
            self._left -= len(text)
            if self._left <= 0:
                self._stream.write("\n[what scorers print from here on is left out]\n")
        return len(text)

    def flush(self) -> None:
        """Passes on what waits."""
        self._stream.flush()


def start(names: tuple[str, ...], memory_gb: float) -> None:
    """Prepare the process: limit what it may take, import the scorers of all rows, and end with the process that
    started this one."""
    prepare_process()
    most = int(memory_gb * 1024**3)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    sys.stdout, sys.stderr = Printed(sys.stdout), Printed(sys.stderr)
    for name in names:
        with suppress(Exception):  # reported with each response
            resolve_scorer(name)


def score_chunk(chunk: list[Packed], budget_s: float) -> list[RewardResult]:
    """Results of the first responses: of all, or of those that were begun within the budget (at least one)."""
    end = time.monotonic() + budget_s
    results: list[RewardResult] = []
    for packed in chunk:
        begun = time.monotonic()
        if results and begun > end:
            break
        results.append(replace(_score(*packed), seconds=time.monotonic() - begun))
    return results


def _score(name: str, response: str, row: Row, trajectory: dict[str, Any] | None) -> RewardResult:
    try:
        scorer: Any = resolve_scorer(name)
        value = finished(scorer(response, row) if trajectory is None else scorer(response, row, trajectory))
        rewards = value if isinstance(value, dict) else {"score": value}
        if "score" not in rewards or not all(isinstance(reward, Real) for reward in rewards.values()):
            return failure("error", f"scorer '{name}' returned {value!r}, expected a float or a dict with 'score'")
        if len(rewards) > MAX_NAMED:
            return failure("error", f"scorer '{name}' returned {len(rewards)} rewards, at most {MAX_NAMED} are kept")
        named = {str(key): float(reward) for key, reward in rewards.items()}
    except OverflowError:
        return failure("non_finite", traceback.format_exc())
    except BaseException:  # also SystemExit: whatever a scorer raises concerns its response only
        return failure("error", traceback.format_exc())
    if not all(isfinite(reward) for reward in named.values()):
        return failure("non_finite", f"scorer '{name}' returned {named}")
    return RewardResult(named.pop("score"), "ok", named=named)
