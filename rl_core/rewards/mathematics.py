"""Answers of mathematics, compared as values by math-verify."""

import logging
import re
from decimal import Decimal

from math_verify import parse, verify

from rl_core.data.boxed import BOX, in_box, last_box
from rl_core.rewards.scorers import WINDOW, Row, truth_of

# It warns that its timeouts are off. They are alarms within this process; the runner kills the process instead.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_POWER = re.compile(r"\d[\d,]*(?:\.\d+)?[eE]([-+]?\d+)")


def boxed(response: str, row: Row) -> float:
    """1 when the answer in the last `\\boxed{…}` has the value of the ground truth.

    A response without a box has the answer that math-verify finds near its end; one whose last box is not closed has
    none. What the verifier raises is raised, so that the response has a status and no score.
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
    # A formula that is cut by the window's start must not be read as another one.
    near = text if len(text) <= WINDOW else text[-WINDOW:].partition(" ")[2]
    return _POWER.sub(_written_out, near)  # else 18e1 is read as 18


def _written_out(number: re.Match[str]) -> str:
    return format(Decimal(number[0].replace(",", "")), "f") if len(number[1]) <= 4 else ""
