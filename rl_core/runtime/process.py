"""Identification of processes across commands."""

from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Process:
    """A process by id and start time; `started` (seconds since the epoch) detects reuse of the id."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> "Process":
        """The process that currently has this id."""
        return cls(pid, psutil.Process(pid).create_time())

    def find(self) -> psutil.Process | None:
        """The process, or None if it has ended."""
        try:
            process = psutil.Process(self.pid)
            ended = abs(process.create_time() - self.started) > 1 or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return None if ended else process
