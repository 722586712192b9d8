"""Scores programs written by the policy with the row's tests."""

import json
import math
import re
import time

from rl_core.rewards.programs import run_program
from rl_core.rewards.scorers import BrokenTruth, Row, truth_of

TIME_S = 4.0
"""Time limit in seconds for all tests of a response together, if the ground truth has no `timeout_s`."""
_FENCE = re.compile(r"^```(\w*)[ \t]*$", re.MULTILINE)


def code(response: str, row: Row) -> dict[str, float]:
    """1 if the response's last ```python block passes all tests of the row; `tests_passed` is the share passed.

    The ground truth is JSON: {"tests": [statements that raise on failure]} or {"inputs": [stdin texts], "outputs":
    [expected stdout texts]}, optionally with `timeout_s`. Raises BrokenTruth for anything else, and InputError if
    programs cannot be isolated on this machine; then none has run.
    """
    tests, inputs, outputs, time_s = true_tests(row)
    program, end = last_block(response), time.monotonic() + time_s
    if program is None:
        passed = 0
    elif tests:
        passed = len(run_program(program, end, tests=tests).passed)
    else:
        passed = sum(_prints(program, *case, end) for case in zip(inputs, outputs, strict=True))
    share = passed / len(tests or inputs)
    return {"score": float(share == 1), "tests_passed": share}


def true_tests(row: Row) -> tuple[list[str], list[str], list[str], float]:
    """Tests, inputs, outputs and time limit in seconds of the row's ground truth; raises BrokenTruth if unusable."""
    try:
        truth = json.loads(truth_of(row))
    except (ValueError, RecursionError) as error:
        raise BrokenTruth(f"the ground truth for code is not JSON: {error}") from error
    if not isinstance(truth, dict):
        raise BrokenTruth("the ground truth for code is not a JSON object")
    tests, inputs, outputs = (truth.get(key) or [] for key in ("tests", "inputs", "outputs"))
    texts = [tests, inputs, outputs]
    if not all(isinstance(each, list) and all(isinstance(text, str) for text in each) for each in texts):
        raise BrokenTruth("`tests`, `inputs` and `outputs` of the ground truth for code must be lists of strings")
    if bool(tests) == bool(inputs) or len(inputs) != len(outputs):
        raise BrokenTruth("the ground truth for code needs either `tests`, or `inputs` and `outputs` of equal length")
    time_s = truth.get("timeout_s", TIME_S)
    if isinstance(time_s, bool) or not isinstance(time_s, int | float) or not 0 < time_s < math.inf:
        raise BrokenTruth("`timeout_s` of the ground truth for code must be a positive number of seconds")
    return tests, inputs, outputs, float(time_s)


def last_block(response: str) -> str | None:
    """Content of the last closed ```python (or ```py) block; None if there is none."""
    found, start = None, None
    for fence in _FENCE.finditer(response):
        if start is None:
            start = fence
        elif not fence[1]:
            if start[1] in ("python", "py", "python3"):
                found = response[start.end() + 1 : fence.start()]
            start = None
    return found


def _prints(program: str, text: str, expected: str, end: float) -> bool:
    """Whether the program exits with 0 and prints the expected output for stdin `text`, ignoring trailing white
    space."""
    ended = run_program(program, end, text)
    return ended.succeeded and _lines(ended.output) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
