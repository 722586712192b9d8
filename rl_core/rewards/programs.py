"""Starts programs written by a model in the sandbox, with a deadline for all that they start."""

import functools
import itertools
import marshal
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

from rl_core.config.reward import Isolation
from rl_core.errors import InputError
from rl_core.rewards import sandbox
from rl_core.rewards.seccomp import system_call_filter

LEAST_S = 1.0
"""Time in which a sandbox starts; a program with less time left than this fails if it does not start."""
PROBE_S = 30.0
PROBE = f"""import os, time
started = 0
try:
    while started < {2 * sandbox.PROCESSES}:
        if os.fork() == 0:
            time.sleep({PROBE_S})
        started += 1
except OSError:
    print(started > 0)
"""
"""Prints True if it can start processes, but not more than the limit, which does not bind every root user."""
_isolation: Isolation = "namespaces"


@dataclass(frozen=True)
class Ended:
    """Whether the program exited with 0 in time, what it printed, and the indices of the tests that it passed."""

    succeeded: bool
    output: str = ""
    passed: frozenset[int] = frozenset()


def isolate(isolation: Isolation) -> None:
    """Sets the isolation of all programs that this process starts."""
    global _isolation
    _isolation = isolation


@functools.cache
def check_isolation(isolation: Isolation) -> None:
    """Raises InputError if this machine does not allow the isolation of programs."""
    if isolation == "none":
        return
    try:
        probed = run_program(PROBE, time.monotonic() + PROBE_S, isolation=isolation)
    except TimeoutError as error:
        _refuse(str(error))
    if probed.output != "True\n":
        _refuse(f"the limit of {sandbox.PROCESSES} processes does not bind this user, or no process can be started")


def run_program(
    program: str, end: float, text: str = "", tests: Sequence[str] = (), isolation: Isolation | None = None
) -> Ended:
    """Runs a program until `end` (of time.monotonic) with stdin `text`, or imports it and then runs the tests.

    All processes that it started are killed; without namespaces those that left its process group may remain. Raises
    InputError if the program cannot be isolated, and TimeoutError if the sandbox itself does not start in time; in both
    cases it has not run.
    """
    isolation, left = isolation or _isolation, end - time.monotonic()
    if left <= 0:
        return Ended(False)
    secret = secrets.token_hex(16)  # unknown to the program until its tests run
    with _folder(isolation) as folder, _files(6) as (source, report, stdin, output, asked, passed):
        _write(source, program.encode("utf-8", "backslashreplace"))
        _write(stdin, text.encode())
        _write(asked, marshal.dumps((secret, list(tests)), 2))  # unlike json, nothing that has to be loaded
        files = (source, report, *((asked, passed) if tests else ()))
        in_time = _wait(_command(isolation, math.ceil(left), files), folder, files, stdin, output, left)
        said = _content(report)
        if not said.startswith(sandbox.STARTED):
            if in_time:
                _refuse(said.decode("utf-8", "replace").removeprefix("refused ") or "the sandbox died")
            if left > LEAST_S:
                raise TimeoutError(f"the sandbox did not start within {left:.1f} s")
        lines = set(_content(passed).split(b"\n"))
        return Ended(
            in_time and said == sandbox.STARTED + b"exit 0\n",
            _content(output).decode("utf-8", "replace"),
            frozenset(number for number in range(len(tests)) if f"{secret} {number}".encode() in lines),
        )


def _wait(command: list[str], folder: str | None, files: tuple[int, ...], stdin: int, output: int, left: float) -> bool:
    """Whether the sandbox ended in time; its process group is killed afterwards."""
    home = folder or sandbox.FOLDER
    # Pass on nothing from this process's environment, which may hold credentials.
    environment = {"PATH": os.defpath, "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=folder or "/",
        env=environment,
        stdin=stdin,
        stdout=output,
        stderr=subprocess.DEVNULL,
        pass_fds=files,
        start_new_session=True,
    )
    try:
        ended = os.pidfd_open(process.pid)  # unlike Popen.wait, which looks up to 50 ms too late
        try:
            waiting = select.poll()
            waiting.register(ended, select.POLLIN)
            return bool(waiting.poll(left * 1000))
        finally:
            os.close(ended)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _command(isolation: Isolation, cpu_s: int, files: Sequence[int]) -> list[str]:
    arguments = (isolation, system_call_filter().hex(), os.getpid(), cpu_s, *files)
    return [sys.executable, "-I", "-S", sandbox.__file__, *map(str, arguments)]


def _refuse(reason: str) -> NoReturn:
    raise InputError(
        expected="namespaces that isolate programs written by the model",
        seen=reason,
        where="reward.code.isolation=namespaces",
        fix="allow user namespaces, or run as an ordinary user (docs/rewards.md, section Code); "
        "reward.code.isolation=none runs such programs with all rights of this user",
    )


@contextmanager
def _files(number: int) -> Iterator[list[int]]:
    """Files in memory, which have no name in any folder."""
    files = [os.memfd_create("program") for _ in range(number)]
    try:
        yield files
    finally:
        for file in files:
            os.close(file)


def _write(file: int, content: bytes) -> None:
    """Writes the whole content, which is then read from its beginning."""
    with open(file, "wb", closefd=False) as stream:
        stream.write(content)
    os.lseek(file, 0, os.SEEK_SET)


def _content(file: int) -> bytes:
    """The file's content, up to the limit of a program's files."""
    return os.pread(file, sandbox.FILE_SIZE, 0)


@contextmanager
def _folder(isolation: Isolation) -> Iterator[str | None]:
    """A temporary folder for a program without namespaces; the others have one of their own."""
    if isolation == "namespaces":
        yield None
        return
    folder = tempfile.mkdtemp()
    try:
        yield folder
    finally:
        remove_folder(folder)


def remove_folder(folder: str) -> None:
    """Removes a folder of any depth and follows no link; what a running program still adds may remain."""
    numbers = itertools.count()
    with suppress(OSError):
        while names := os.listdir(folder):
            for path in (os.path.join(folder, name) for name in names):
                if os.path.islink(path) or not os.path.isdir(path):
                    os.unlink(path)
                    continue
                os.chmod(path, 0o700)
                for name in os.listdir(path):  # moved up, so that neither recursion nor paths grow with the depth
                    os.rename(os.path.join(path, name), os.path.join(folder, f"{secrets.token_hex(8)}{next(numbers)}"))
                os.rmdir(path)
        os.rmdir(folder)
