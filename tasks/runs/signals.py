"""SIGINT and SIGTERM while steps are made: the one that is under way may end first, within the grace period."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rl_core.console import duration

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """In the block, which has to end soon by itself, signals do nothing."""
    in_main = threading.current_thread() is threading.main_thread()
    found = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS if in_main}
    try:
        yield
    finally:
        for number, before in found.items():
            signal.signal(number, before)


class Stopping:
    """Puts signals off until a step is made.

    Within `stepping` the first signal only sets `asked`, unless the step would take longer than the grace period. A
    second one, or the end of that period, does what it did before: Python raises KeyboardInterrupt, and for SIGTERM
    Prefect an exception of its own.
    """

    def __init__(self, grace_s: float, notify: Callable[[str], None]) -> None:
        """`notify` gets what a person should read."""
        self._grace_s, self._notify = grace_s, notify
        self._before: dict[int, Any] = {}
        self._number = 0
        self._asked = self._began = self._seconds = 0.0

    def asked(self) -> bool:
        """Whether the step under way shall be the last one."""
        return bool(self._number)

    @property
    def left_s(self) -> float:
        """What is left of the grace period, in seconds; 0 when there was no signal."""
        return max(0.0, self._asked + self._grace_s - time.monotonic()) if self._asked else 0.0

    def step_began(self, seconds: float = 0.0) -> None:
        """A step begins, which takes so long as far as is known; 0 when nothing is."""
        self._began, self._seconds = time.monotonic(), seconds

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Steps are made in the block; a signal that was put off takes effect at its end. Only the main thread can put
        signals off."""
        self.step_began()
        in_main = threading.current_thread() is threading.main_thread()
        # What is ignored stays ignored.
        found = {number: signal.getsignal(number) for number in SIGNALS if in_main}
        self._before = {number: before for number, before in found.items() if before != signal.SIG_IGN}
        for number in self._before:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, before in self._before.items():
                signal.signal(number, before)
            if self._number:
                signal.raise_signal(self._number)

    def _handle(self, number: int, frame: Any) -> None:
        left = max(0.0, self._began + self._seconds - time.monotonic())
        first, self._asked = not self._asked, self._asked or time.monotonic()
        if not first or left > self._grace_s or not self._grace_s:
            self._number = number if self._number else 0
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
            return
        self._number = number
        about = f" (about {duration(left)})" if left else ""
        text = f"asked to stop: the step that is under way ends first{about}; a second signal abandons it"
        # In a thread of its own, for the signal may have come while a line was being printed.
        threading.Thread(target=self._notify, args=(text,), daemon=True).start()
        threading.Thread(target=self._end_grace, args=(number,), daemon=True).start()

    def _end_grace(self, number: int) -> None:
        time.sleep(self._grace_s)
        if signal.getsignal(number) == self._handle:
            signal.pthread_kill(threading.main_thread().ident or 0, number)
