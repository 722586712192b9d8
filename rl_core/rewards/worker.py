"""Code that runs inside a scoring process; light imports only, so that a killed process is replaced quickly."""

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

from rl_core.config.reward import Isolation
from rl_core.errors import InputError
from rl_core.rewards.programs import isolate
from rl_core.rewards.scorers import NAMED_REWARDS, BrokenTruth, Row, is_builtin, resolve_scorer
from rl_core.runtime.process_pool import finished, prepare_process, writable

Packed = tuple[str, str, Row, dict[str, Any] | None]
"""Scorer name, response, row and trajectory (None for scorers that do not take it)."""
Status = Literal["ok", "unreadable", "invalid", "non_finite", "timeout", "error", "out_of_range"]
MISTAKES: tuple[Status, ...] = ("invalid", "non_finite")
"""Statuses of a mistake in a scorer, which a retry would repeat."""
MAX_DETAIL = 4000
"""Maximum length of a stored error text in characters; only its end is kept."""
MAX_NAMED = 64
"""Maximum number of rewards returned by a scorer."""
MAX_PRINTED = 1_000_000
"""Maximum number of characters that a scoring process prints in its lifetime."""


@dataclass(frozen=True)
class RewardResult:
    """Score and named rewards of a response; without a score, `score` is None. `detail` has the reason if it is not
    `ok`."""

    score: float | None
    status: Status
    detail: str = ""
    named: dict[str, float] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)
    """Time spent in the scorers, or waiting for one that did not finish."""


def failure(status: Status, detail: str) -> RewardResult:
    """A result without a score; `detail` is cleaned so that it can be written to any file."""
    return RewardResult(None, status, writable(detail[-MAX_DETAIL:]))


def unreadable(name: str, detail: str) -> RewardResult:
    """The result of a built-in scorer that could not read a response, or not within its limits: a score of 0, because
    a response must not be able to opt out of its score."""
    named = dict.fromkeys(NAMED_REWARDS.get(name, ()), 0.0)
    return replace(failure("unreadable", detail), score=0.0, named=named)


class Printed(io.TextIOBase):
    """A stream limited to MAX_PRINTED characters: a scorer that prints every response would fill the disk with logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._left = stream, MAX_PRINTED

    def write(self, text: str) -> int:
        """Writes the text up to the limit."""
        if self._left > 0:
            self._stream.write(text[: self._left])
            self._left -= len(text)
            if self._left <= 0:
                self._stream.write("\n[further output of scorers is omitted]\n")
        return len(text)

    def flush(self) -> None:
        """Flushes the underlying stream."""
        self._stream.flush()


def start(names: tuple[str, ...], memory_gb: float, isolation: Isolation) -> None:
    """Prepares a scoring process: binds its life to its parent's, limits its memory and output, sets the isolation of
    programs, and imports the scorers that apply to all rows."""
    prepare_process()
    isolate(isolation)
    limit = int(memory_gb * 1024**3)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    sys.stdout, sys.stderr = Printed(sys.stdout), Printed(sys.stderr)
    for name in names:
        with suppress(Exception):  # reported per response
            resolve_scorer(name)


def score_chunk(chunk: list[Packed], budget_s: float) -> list[RewardResult]:
    """Results of the leading responses that start within the budget, at least one."""
    end = time.monotonic() + budget_s
    results: list[RewardResult] = []
    for packed in chunk:
        begin = time.monotonic()
        if results and begin > end:
            break
        results.append(replace(_score(*packed), seconds=time.monotonic() - begin))
    return results


def _score(name: str, response: str, row: Row, trajectory: dict[str, Any] | None) -> RewardResult:
    try:
        scorer: Any = resolve_scorer(name)
    except BaseException:  # including SystemExit, here and below: an error affects this response only
        return failure("invalid", traceback.format_exc())
    try:
        value = finished(scorer(response, row) if trajectory is None else scorer(response, row, trajectory))
    except InputError:  # programs cannot be isolated on this machine, which is not the response's fault
        return failure("error", traceback.format_exc())
    except BaseException as error:
        if is_builtin(name) and not isinstance(error, BrokenTruth):
            return unreadable(name, traceback.format_exc())
        return failure("invalid", traceback.format_exc())
    return _checked(name, value)


def _checked(name: str, value: Any) -> RewardResult:
    """The result for a value returned by a scorer, which can be anything."""
    try:
        rewards = value if isinstance(value, dict) else {"score": value}
        if "score" not in rewards or not all(isinstance(reward, Real) for reward in rewards.values()):
            return failure("invalid", f"scorer '{name}' returned {value!r}, expected a float or a dict with 'score'")
        if len(rewards) > MAX_NAMED:
            return failure("invalid", f"scorer '{name}' returned {len(rewards)} rewards (maximum {MAX_NAMED})")
        named = {str(key): float(reward) for key, reward in rewards.items()}
    except OverflowError:
        return failure("non_finite", traceback.format_exc())
    except BaseException:
        return failure("invalid", traceback.format_exc())
    if not all(isfinite(reward) for reward in named.values()):
        return failure("non_finite", f"scorer '{name}' returned {named}")
    return RewardResult(named.pop("score"), "ok", named=named)
