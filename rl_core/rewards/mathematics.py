"""Scorer for mathematics: compares answers by value, with math-verify."""

import logging
import re
from decimal import Decimal

from math_verify import parse, verify

from rl_core.data.boxed import BOX, in_box, last_box
from rl_core.rewards.scorers import WINDOW, Row, truth_of

# Silences its warning about disabled timeouts. They would use alarms in this process; the runner kills it instead.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_POWER = re.compile(r"\d[\d,]*(?:\.\d+)?[eE]([-+]?\d+)")


def boxed(response: str, row: Row) -> float:
    """1 if the answer in the last `\\boxed{…}` equals the ground truth in value.

    Without a box, the answer is the one that math-verify finds near the end of the response; with an unclosed last box
    there is no answer. Exceptions of the verifier are passed on, so the response gets a status and no score.
    """
    truth = last_box(truth_of(row)) or truth_of(row)
    answer = last_box(response) if BOX in response else _window(response)
    if not answer or not answer.strip():
        return 0.0
    if BOX in response:
        if answer.strip() == truth.strip():
            return 1.0
        answer = in_box(answer)
    return float(verify(_values(in_box(truth)), _values(answer), timeout_seconds=None, raise_on_error=True))


def _values(text: str) -> list[object]:
    found: list[object] = parse(text, parsing_timeout=None, raise_on_error=True)
    return found


def _window(text: str) -> str:
    # Drop a formula cut off by the start of the window: it would be read as a different one.
    end = text if len(text) <= WINDOW else text[-WINDOW:].partition(" ")[2]
    return _POWER.sub(_written_out, end)  # math-verify would read 18e1 as 18


def _written_out(number: re.Match[str]) -> str:
    return format(Decimal(number[0].replace(",", "")), "f") if len(number[1]) <= 4 else ""
