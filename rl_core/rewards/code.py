"""Scores programs written by the policy with the row's tests, in a process with minimal privileges."""

import functools
import json
import logging
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from rl_core.rewards import sandbox
from rl_core.rewards.scorers import BrokenTruth, Row, truth_of

logger = logging.getLogger(__name__)

TIME_S = 4.0
"""Time limit in seconds for all tests of a response together, if the ground truth has no `timeout_s`."""
_FENCE = re.compile(r"^```(\w*)[ \t]*$", re.MULTILINE)


def code(response: str, row: Row) -> dict[str, float]:
    """1 if the response's last ```python block passes all tests of the row; `tests_passed` is the share passed.

    The ground truth is JSON: {"tests": [statements that raise on failure]} or {"inputs": [stdin texts], "outputs":
    [expected stdout texts]}, optionally with `timeout_s`. Raises BrokenTruth for anything else.
    """
    tests, inputs, outputs, time_s = true_tests(row)
    program, end = last_block(response), time.monotonic() + time_s
    if program is None:
        passed = 0
    elif tests:
        passed = _tests_passed(program, tests, end)
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


@functools.cache
def warn_without_namespaces() -> None:
    """Warns once if the kernel does not allow programs separate namespaces."""
    if subprocess.run(_command("probe", 0, 1), env=_environment("/"), stdin=subprocess.DEVNULL).returncode:
        logger.warning("the kernel denies user namespaces: programs under test can reach the network (docs/rewards.md)")


def _tests_passed(program: str, tests: list[str], end: float) -> int:
    """Number of tests that the program passes; they share one process, so a hanging test fails all later ones."""
    secret = secrets.token_hex(16)  # unknown to the program, so it cannot forge verdicts
    with tempfile.TemporaryFile() as tests_file, tempfile.TemporaryFile() as output:
        tests_file.write(json.dumps({"secret": secret, "tests": tests}).encode())
        tests_file.seek(0)
        with tempfile.TemporaryDirectory() as folder:
            _run(folder, program, "tests", tests_file, None, output, end)
            verdict = Path(folder, sandbox.VERDICT)
            lines = set(verdict.read_text("utf-8", "replace").splitlines()) if verdict.is_file() else set()
    return sum(f"{secret} {number}" in lines for number in range(len(tests)))


def _prints(program: str, text: str, expected: str, end: float) -> bool:
    """Whether the program exits with 0 and prints the expected output for stdin `text`, ignoring trailing white
    space."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as output:
        stdin.write(text.encode())
        stdin.seek(0)
        with tempfile.TemporaryDirectory() as folder:
            succeeded = _run(folder, program, "script", None, stdin, output, end)
        output.seek(0)
        return succeeded and _lines(output.read().decode("utf-8", "replace")) == _lines(expected)


def _run(
    folder: str,
    program: str,
    mode: str,
    tests_file: IO[bytes] | None,
    stdin: IO[bytes] | None,
    output: IO[bytes],
    end: float,
) -> bool:
    """Whether the program exited with code 0 in time; its whole process group is killed afterwards."""
    left = end - time.monotonic()
    if left <= 0:
        return False
    Path(folder, sandbox.PROGRAM).write_text(program, "utf-8", "backslashreplace")
    process = subprocess.Popen(
        _command(mode, tests_file.fileno() if tests_file else 0, math.ceil(left)),
        cwd=folder,
        env=_environment(folder),
        stdin=stdin or subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.DEVNULL,
        pass_fds=(tests_file.fileno(),) if tests_file else (),
        start_new_session=True,
    )
    try:
        return process.wait(left) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _command(mode: str, tests_fd: int, cpu_s: int) -> list[str]:
    return [sys.executable, "-I", sandbox.__file__, mode, str(tests_fd), str(cpu_s)]


def _environment(folder: str) -> dict[str, str]:
    # Pass on nothing from this process's environment, which may hold credentials.
    return {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
