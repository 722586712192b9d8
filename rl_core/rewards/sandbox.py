"""Runs a program that a model wrote, as little of the machine within its reach as the kernel lets an ordinary user do.

A script for `python -I`; it imports nothing of the project. `sandbox.py MODE TEST CPU_S`, in the folder that holds the
program: MODE `script` runs it as main module, `tests` runs it and then the tests, which it reads from file descriptor
TEST, and `probe` runs nothing; its exit code tells whether there are namespaces.
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
"""Bytes of addresses, bytes of a file (which bounds what it prints), processes and threads."""
NEW_USER, NEW_NETWORK, NEW_PIDS = 0x10000000, 0x40000000, 0x20000000
DEATH_SIGNAL = 1
LIBC = ctypes.CDLL(None, use_errno=True)


def main(mode: str, tests: int, cpu_s: int) -> int:
    """Exit code of the program, or of the probe."""
    _die_with_parent()
    isolated = _leave_namespaces()
    if mode == "probe":
        return 0 if isolated else 1
    child = os.fork()
    if child == 0:  # the first process of its namespace: all others in it end with it
        _die_with_parent()
        _limit(cpu_s)
        _run(mode, tests)
        return 0
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _die_with_parent() -> None:
    LIBC.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _leave_namespaces() -> bool:
    """No network, and no sight of other processes to signal; False where the kernel refuses."""
    uid, gid = os.geteuid(), os.getegid()
    if LIBC.unshare(NEW_USER | NEW_NETWORK | NEW_PIDS) != 0:
        return False
    with contextlib.suppress(OSError):  # unmapped ids only show as nobody's
        for file, text in (("uid_map", f"{uid} {uid} 1"), ("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{file}", "w") as there:
                there.write(text)
    return True


def _limit(cpu_s: int) -> None:
    for what, most in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE_SIZE),
        (resource.RLIMIT_NPROC, PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def _run(mode: str, tests: int) -> None:
    if mode == "script":
        runpy.run_path(PROGRAM, run_name="__main__")
        return
    sys.path.insert(0, os.getcwd())
    names = vars(importlib.import_module(PROGRAM.removesuffix(".py")))
    # Read only now, so that the program is over when the tests come into its process.
    wanted = json.loads(os.read(tests, 1 << 24))
    for number, test in enumerate(wanted["tests"]):
        with contextlib.suppress(Exception):
            exec(compile(test, f"test {number}", "exec"), names)
            with open(VERDICT, "a") as verdict:
                verdict.write(f"{wanted['word']} {number}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
