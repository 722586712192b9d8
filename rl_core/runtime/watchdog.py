"""Kills a process that has made no progress for too long, for example because a read never returns."""

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from rl_core.runtime.guardian import is_guardian

CHECK_S = 1.0
"""Interval between checks."""
REPORT_S = 20.0
"""Maximum time for the report before the process is killed: the report may need what hangs."""
HELD_S = 60.0
"""Time after the limit at which the process is killed even if it cannot run Python code."""

_last_progress = time.monotonic()


def progress() -> None:
    """Records that this process is making progress; cheap enough to call anywhere."""
    global _last_progress
    _last_progress = time.monotonic()


class Watchdog:
    """Within its block, kills this process and its children with exit code 1 if no progress was recorded for
    `limit_s` seconds."""

    def __init__(self, limit_s: float, on_end: Callable[[float], None]) -> None:
        """`on_end(seconds without progress)` reports what the process was doing; it runs in a separate thread."""
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
            # Runs without Python code, for the case that a thread holds the interpreter lock and does not return.
            faulthandler.dump_traceback_later(self._limit_s + HELD_S, exit=True, file=2)
            silent_s = time.monotonic() - _last_progress
            if silent_s > self._limit_s:
                self._end(silent_s)

    def _end(self, silent_s: float) -> None:
        reporter = threading.Thread(target=self._on_end, args=(silent_s,), daemon=True)
        reporter.start()
        reporter.join(REPORT_S)
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if not is_guardian(child):  # it still has to end processes that are no longer children of this one
                    child.kill()
        os._exit(1)
