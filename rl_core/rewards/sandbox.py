"""Runs a program written by a model with as much isolation as the kernel allows an unprivileged user.

A script for `python -I`; it imports nothing from the project. Usage, in the program's folder: `sandbox.py MODE FD
CPU_S`. MODE `script` runs the program as main module; `tests` runs it and then the tests, read from file descriptor
FD; `probe` runs nothing and exits with 0 if namespaces are available.
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import runpy
import signal
import sys

PROGRAM, VERDICT = "program.py", "verdict"
MEMORY, FILE_SIZE, PROCESSES = 1 << 30, 1 << 20, 64
"""Limits: address space in bytes, file size in bytes (which also bounds the output), processes and threads."""
NEW_USER, NEW_NETWORK, NEW_PIDS = 0x10000000, 0x40000000, 0x20000000
DEATH_SIGNAL = 1
LIBC = ctypes.CDLL(None, use_errno=True)


def main(mode: str, tests_fd: int, cpu_s: int) -> int:
    """Returns the exit code of the program, or of the probe."""
    _die_with_parent()
    isolated = _leave_namespaces()
    if mode == "probe":
        return 0 if isolated else 1
    child = os.fork()
    if child == 0:  # the first process of its PID namespace: when it exits, the kernel kills all others in it
        _die_with_parent()
        _limit(cpu_s)
        _run(mode, tests_fd)
        return 0
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _die_with_parent() -> None:
    LIBC.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _leave_namespaces() -> bool:
    """Enters namespaces without network and without visible processes; False if the kernel denies it."""
    uid, gid = os.geteuid(), os.getegid()
    if LIBC.unshare(NEW_USER | NEW_NETWORK | NEW_PIDS) != 0:
        return False
    with contextlib.suppress(OSError):  # without the mapping, ids merely appear as nobody
        for name, text in (("uid_map", f"{uid} {uid} 1"), ("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    return True


def _limit(cpu_s: int) -> None:
    for kind, limit in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE_SIZE),
        (resource.RLIMIT_NPROC, PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def _run(mode: str, tests_fd: int) -> None:
    if mode == "script":
        runpy.run_path(PROGRAM, run_name="__main__")
        return
    sys.path.insert(0, os.getcwd())
    names = vars(importlib.import_module(PROGRAM.removesuffix(".py")))
    # Read after the program has run, so that it cannot see the tests.
    request = json.loads(os.read(tests_fd, 1 << 24))
    for number, test in enumerate(request["tests"]):
        with contextlib.suppress(Exception):
            exec(compile(test, f"test {number}", "exec"), names)
            with open(VERDICT, "a") as verdict:
                verdict.write(f"{request['secret']} {number}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
