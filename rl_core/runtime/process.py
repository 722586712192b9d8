"""Processes that later commands must find again."""

from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Process:
    """A process by number and start time; `started` (seconds since 1970) tells it from a later one with its number."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> "Process":
        """The process that has the number now."""
        return cls(pid, psutil.Process(pid).create_time())

    def find(self) -> psutil.Process | None:
        """The process, or None when it has ended."""
        try:
            process = psutil.Process(self.pid)
            ended = abs(process.create_time() - self.started) > 1 or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return None if ended else process
