"""Scorer for mathematics: compares answers by value, with math-verify."""

import functools
import logging
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from types import FrameType
from typing import Any

from math_verify import parse, verify
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig
from sympy import Basic, Eq

from rl_core.data.boxed import BOX, in_box, last_box
from rl_core.rewards.answer_text import UnreadableAnswer, check_size, cleaned, is_misread
from rl_core.rewards.scorers import Row, truth_of

# Silences its warning about disabled timeouts: they measure wall time, which depends on the machine's load.
logging.getLogger("math_verify").setLevel(logging.ERROR)
WINDOW = 1000
"""Number of characters at the end of a response without a box that are searched for an answer."""
LIMIT_S = 0.8
"""Seconds of CPU time to parse and compare a response."""
# Without an anchor, the last of any numbers of a text would be its answer.
_PLAIN = (LatexExtractionConfig(), ExprExtractionConfig(try_extract_without_anchor=False))
_SCIENTIFIC = re.compile(r"\d[\d,]*(?:\.\d+)?[eE]([-+]?\d+)")
_SIDE = r"(?:[\d(][-+*/().\d ]*)"
_EQUATION = re.compile(rf"(?<![\w+*/^.=(-])(?<![-+*/^=(] )({_SIDE})=(?= *(-?{_SIDE}))")


class _TooLong(BaseException):
    """Raised by the timer; not an Exception, which the libraries catch in many places."""


def boxed(response: str, row: Row) -> float:
    """1 if the answer in the last `\\boxed{…}` equals the ground truth in value.

    Without a box, the answer is that of the last formula, or after the word `answer`, near the end of the response;
    with an unclosed last box there is no answer. Raises UnreadableAnswer for an answer beyond the limits of
    `check_size` and LIMIT_S, and passes on exceptions of the verifier.
    """
    truth = last_box(truth_of(row)) or truth_of(row)
    if BOX not in response:
        return _plain(_window(response), truth)
    answer = last_box(response)
    if not answer or not answer.strip():
        return 0.0
    if answer.strip() == truth.strip():
        return 1.0
    check_size(answer)
    answer, truth = cleaned(answer), cleaned(truth)
    if is_misread(answer, truth):
        return 0.0
    truths = _truth_values(truth)
    with _cpu_limit():
        return _equal(truths, parse(in_box(answer), parsing_timeout=None, raise_on_error=True))


def _plain(text: str, truth: str) -> float:
    for part in re.split(r"\$+|\\[()\[\]]|\n", text):
        check_size(part, WINDOW)
    truths = _truth_values(cleaned(truth))
    with _cpu_limit():
        for left, right in _EQUATION.findall(text):
            if not _equal(*(parse(in_box(side), parsing_timeout=None) for side in (left, right))):
                return 0.0
        return _equal(truths, parse(text, _PLAIN, parsing_timeout=None, raise_on_error=True))


@functools.lru_cache(maxsize=1024)
def _truth_values(truth: str) -> list[Any]:
    """The values of a ground truth; its text alone if it is beyond the limits of an answer."""
    try:
        check_size(truth)
        with _cpu_limit():
            return list(parse(in_box(truth), parsing_timeout=None, raise_on_error=True))
    except UnreadableAnswer:
        return [truth]


def _equal(truths: list[Any], answers: list[Any]) -> float:
    if any(_is_false(answer) for answer in answers):
        return 0.0
    return float(verify(truths, answers, timeout_seconds=None, raise_on_error=True))


def _is_false(answer: Any) -> bool:
    """Whether an equation has two sides without variables that differ: the verifier reads only its last side."""
    if not isinstance(answer, Basic):
        return False
    equations = answer.atoms(Eq)
    return any(not e.free_symbols and not verify([e.rhs], [e.lhs], timeout_seconds=None) for e in equations)


@contextmanager
def _cpu_limit() -> Iterator[None]:
    """Raises UnreadableAnswer after LIMIT_S of CPU time; without effect outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        yield
    except _TooLong:
        raise UnreadableAnswer(f"the answer takes more than {LIMIT_S:g} s to parse and compare") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _window(text: str) -> str:
    # Drop a formula cut off by the start of the window: it would be read as a different one.
    end = text if len(text) <= WINDOW else text[-WINDOW:].partition(" ")[2]
    return _SCIENTIFIC.sub(_written_out, end)  # math-verify would read 18e1 as 18


def _written_out(number: re.Match[str]) -> str:
    return format(Decimal(number[0].replace(",", "")), "f") if len(number[1]) <= 3 else ""
