"""SIGINT and SIGTERM during training: the current step may finish first, within the grace period."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rl_core.console import duration

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def ignore_signals() -> Iterator[None]:
    """Ignores SIGINT and SIGTERM in the block, which must be short."""
    in_main = threading.current_thread() is threading.main_thread()
    found = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS if in_main}
    try:
        yield
    finally:
        for number, before in found.items():
            signal.signal(number, before)


class GracefulStop:
    """Defers signals until the current step is complete.

    Within `defer_signals` the first signal only sets `requested`, unless the step would take longer than the grace
    period. A second signal, or the end of that period, calls the previous handler: Python raises KeyboardInterrupt,
    and Prefect its own exception for SIGTERM.
    """

    def __init__(self, grace_s: float, notify: Callable[[str], None]) -> None:
        """`grace_s` is the grace period in seconds; `notify` prints a message."""
        self._grace_s, self._notify = grace_s, notify
        self._before: dict[int, Any] = {}
        self._number = 0
        self._signalled_at = self._step_began_at = self._step_s = 0.0

    def requested(self) -> bool:
        """Whether training must stop after the current step."""
        return bool(self._number)

    @property
    def grace_left_s(self) -> float:
        """Remaining seconds of the grace period; 0 if there was no signal."""
        return max(0.0, self._signalled_at + self._grace_s - time.monotonic()) if self._signalled_at else 0.0

    def step_began(self, seconds: float = 0.0) -> None:
        """Records the start of a step and its expected duration in seconds, 0 if unknown."""
        self._step_began_at, self._step_s = time.monotonic(), seconds

    @contextmanager
    def defer_signals(self) -> Iterator[None]:
        """Defers signals during the training steps in the block; a deferred signal takes effect at its end.

        Has no effect outside of the main thread.
        """
        self.step_began()
        in_main = threading.current_thread() is threading.main_thread()
        # Ignored signals stay ignored.
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
        left = max(0.0, self._step_began_at + self._step_s - time.monotonic())
        first, self._signalled_at = not self._signalled_at, self._signalled_at or time.monotonic()
        if not first or left > self._grace_s or not self._grace_s:
            self._number = number if self._number else 0
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
            return
        self._number = number
        about = f" (about {duration(left)})" if left else ""
        text = f"stopping after the current step{about}; a second signal abandons it"
        # In a separate thread, because the signal may have interrupted a print.
        threading.Thread(target=self._notify, args=(text,), daemon=True).start()
        threading.Thread(target=self._end_grace, args=(number,), daemon=True).start()

    def _end_grace(self, number: int) -> None:
        time.sleep(self._grace_s)
        if signal.getsignal(number) == self._handle:
            signal.pthread_kill(threading.main_thread().ident or 0, number)
