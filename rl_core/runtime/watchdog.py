"""Ends a process that no longer gets on: a read that never answers must not hold a run for ever."""

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from rl_core.runtime.guardian import is_guardian

CHECK_S = 1.0
"""Time between two looks."""
TELL_S = 20.0
"""Longest time that is spent on saying what happened: what hangs may be needed for it."""
HELD_S = 60.0
"""Time after the limit at which the process ends though no Python code can run in it."""

_moved = time.monotonic()


def progress() -> None:
    """Says that this process gets on with its work; costs nothing."""
    global _moved
    _moved = time.monotonic()


class Watchdog:
    """Within its block, ends this process and all that it started with exit code 1 when no progress was told for
    `limit_s` seconds."""

    def __init__(self, limit_s: float, on_end: Callable[[float], None]) -> None:
        """`on_end(seconds)` says what the process is doing, in a thread of its own."""
        self._limit_s, self._on_end = limit_s, on_end
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> None:
        progress()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._over.wait(CHECK_S):
            # Needs no Python code to run here, which a thread that holds the interpreter's lock keeps from running.
            faulthandler.dump_traceback_later(self._limit_s + HELD_S, exit=True, file=2)
            silent_s = time.monotonic() - _moved
            if silent_s > self._limit_s:
                self._end(silent_s)

    def _end(self, silent_s: float) -> None:
        teller = threading.Thread(target=self._on_end, args=(silent_s,), daemon=True)
        teller.start()
        teller.join(TELL_S)
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if not is_guardian(child):  # it has to find what is no child of this process any more
                    child.kill()
        os._exit(1)
