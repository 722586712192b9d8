"""Programs that a model wrote, scored by the row's tests in a process with as few rights as can be had."""

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
from rl_core.rewards.scorers import Row, truth_of

logger = logging.getLogger(__name__)

TIME_S = 4.0
"""Seconds that all tests of a response may take together, where the ground truth has no `timeout_s`."""
_FENCE = re.compile(r"^```(\w*)[ \t]*$", re.MULTILINE)


def code(response: str, row: Row) -> dict[str, float]:
    """1 when the response's last block ```python passes all tests of the row; `tests_passed` is the share it passes.

    The ground truth is JSON: {"tests": [statements that raise when they fail]} or {"inputs": [texts on stdin],
    "outputs": [what is then printed]}, and perhaps `timeout_s`. Raises ValueError when it is not.
    """
    truth = json.loads(truth_of(row))
    tests, inputs, outputs = (truth.get(key) or [] for key in ("tests", "inputs", "outputs"))
    if bool(tests) == bool(inputs) or len(inputs) != len(outputs):
        raise ValueError("a ground truth of code has `tests`, or as many `inputs` as `outputs`")
    program, end = last_block(response), time.monotonic() + truth.get("timeout_s", TIME_S)
    if program is None:
        passed = 0
    elif tests:
        passed = _tests_passed(program, tests, end)
    else:
        passed = sum(_prints(program, *case, end) for case in zip(inputs, outputs, strict=True))
    share = passed / len(tests or inputs)
    return {"score": float(share == 1), "tests_passed": share}


def last_block(response: str) -> str | None:
    """What stands in the last closed block ```python (or ```py); None where there is none."""
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
    """Says once where the kernel gives programs no namespaces of their own."""
    if subprocess.run(_command("probe", 0, 1), env=_environment("/"), stdin=subprocess.DEVNULL).returncode:
        logger.warning(
            "the kernel refuses user namespaces: programs under test can reach the network (docs/rewards.md)"
        )


def _tests_passed(program: str, tests: list[str], end: float) -> int:
    """Tests that the program passes; they share one process, so one that hangs costs those after it."""
    word = secrets.token_hex(16)
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as output:
        asked.write(json.dumps({"word": word, "tests": tests}).encode())
        asked.seek(0)
        with tempfile.TemporaryDirectory() as folder:
            _run(folder, program, "tests", asked, None, output, end)
            verdict = Path(folder, sandbox.VERDICT)
            lines = set(verdict.read_text("utf-8", "replace").splitlines()) if verdict.is_file() else set()
    return sum(f"{word} {number}" in lines for number in range(len(tests)))


def _prints(program: str, given: str, wanted: str, end: float) -> bool:
    """Whether the program ends well and prints what is wanted, white space at ends of lines aside."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as output:
        stdin.write(given.encode())
        stdin.seek(0)
        with tempfile.TemporaryDirectory() as folder:
            fine = _run(folder, program, "script", None, stdin, output, end)
        output.seek(0)
        return fine and _lines(output.read().decode("utf-8", "replace")) == _lines(wanted)


def _run(
    folder: str,
    program: str,
    mode: str,
    asked: IO[bytes] | None,
    stdin: IO[bytes] | None,
    output: IO[bytes],
    end: float,
) -> bool:
    """Whether the program ended by itself in time, with exit code 0; nothing of it is left."""
    left = end - time.monotonic()
    if left <= 0:
        return False
    Path(folder, sandbox.PROGRAM).write_text(program, "utf-8", "backslashreplace")
    process = subprocess.Popen(
        _command(mode, asked.fileno() if asked else 0, math.ceil(left)),
        cwd=folder,
        env=_environment(folder),
        stdin=stdin or subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.DEVNULL,
        pass_fds=(asked.fileno(),) if asked else (),
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


def _command(mode: str, tests: int, cpu_s: int) -> list[str]:
    return [sys.executable, "-I", sandbox.__file__, mode, str(tests), str(cpu_s)]


def _environment(folder: str) -> dict[str, str]:
    # Nothing of this process's environment, which may hold credentials.
    return {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
