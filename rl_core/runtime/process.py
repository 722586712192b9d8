"""Identification of processes across commands."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


def boot_id() -> str:
    """Identifier of this boot of the machine; empty if the system does not provide it."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@dataclass(frozen=True)
class Process:
    """A process by id and start; `started` (boot and clock ticks since then) detects reuse of the id.

    Ticks do not change when the machine's clock is set, unlike the start time in seconds since the epoch.
    """

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> "Process":
        """The process that currently has this id; raises psutil.NoSuchProcess if there is none."""
        if not (started := _started(pid)):
            raise psutil.NoSuchProcess(pid)
        return cls(pid, started)

    def find(self) -> psutil.Process | None:
        """The process, or None if it has ended."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid) if _started(self.pid) == self.started else None
        return None


def _started(pid: int) -> str:
    """Boot and start of the process with this id, see proc_pid_stat(5); empty if it has ended."""
    try:
        # The name in parentheses may contain any character.
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else f"{boot_id()} {fields[18]}"
