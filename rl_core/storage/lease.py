"""Who works on a run: a lease in the run's store, which keeps processes of any machines from writing one run together.

Each holder creates the file of the next number, which only one process can, and rewrites it as long as it lives. The
file with the highest number tells who the holder is, and earlier ones who it was: a holder that finds a later number
has lost the lease. Clocks of machines are never compared: a holder counts as gone when its file stays as it is for the
whole time of expiry, or at once when its process has ended on this machine.
"""

import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rl_core.errors import InputError, RollforwardError
from rl_core.runtime.process import Process
from rl_core.runtime.watchdog import progress
from rl_core.storage import run_files
from rl_core.storage.files import Files

logger = logging.getLogger(__name__)

RENEW_S = 10.0
"""Time between two renewals."""
EXPIRE_S = 60.0
"""Time without a renewal after which another process takes over."""
_FILE = re.compile(r"(\d{6})\.json")


@dataclass(frozen=True)
class Holder:
    """What a lease's file says; `since` is the holder's own clock, `machine` where process numbers mean the same."""

    token: str
    host: str
    machine: str
    pid: int
    started: float
    since: str
    renewals: int = 0
    ended: bool = False

    @classmethod
    def of_this_process(cls, machine: str) -> "Holder":
        """This process as a holder, with an identity of its own."""
        process = Process.of(os.getpid())
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        return cls(uuid.uuid4().hex, socket.gethostname(), machine, process.pid, process.started, since)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


def this_machine() -> str:
    """What tells apart machines, their restarts and containers; empty where the system does not say."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


class Lease:
    """The right to write a run, from when this is made until `end` or until another process has taken over."""

    def __init__(
        self,
        store: Files,
        run: str,
        on_wait: Callable[[str], None] = logger.warning,
        renew_s: float = RENEW_S,
        expire_s: float = EXPIRE_S,
        machine: str | None = None,
    ) -> None:
        """Takes the lease of a run, whose folder is `store`, and keeps it.

        Raises InputError when another process has it. Where that cannot be known at once this watches for up to
        `expire_s`, and tells so by `on_wait`. `machine` is where this process runs.
        """
        self._store, self._run, self._on_wait = store, run, on_wait
        self._renew_s, self._expire_s = renew_s, expire_s
        self._machine = this_machine() if machine is None else machine
        self._own = Holder.of_this_process(self._machine)
        self._lost: InputError | None = None
        self._ended = threading.Event()
        self._number = self._take()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Whether it is known that another process has taken over."""
        return self._lost is not None

    def check(self) -> None:
        """Asks the store; raises InputError when another process has taken over."""
        if self._lost is None and self._store.exists(_name(self._number + 1)):
            holder = self._read(_newest(self._store))
            self._lost = InputError(
                f"to hold the lease of run {self._run}",
                f"{holder or 'another process'} has taken over: this one had not renewed it for {self._expire_s:.0f} s",
                self._store.url,
                "leave the run to that process; if it has ended, the same command continues from the last committed "
                "step",
            )
        if self._lost is not None:
            raise self._lost

    def end(self) -> None:
        """Gives the lease up; a lost one stays with its holder."""
        self._ended.set()
        self._thread.join()
        with suppress(RollforwardError):  # it expires
            self.check()
            self._write(replace(self._own, ended=True))

    def _take(self) -> int:
        while True:
            number = _newest(self._store)
            if number:
                self._wait_for(number)
            if self._store.create_bytes(_name(number + 1), _content(self._own)):
                return number + 1

    def _wait_for(self, number: int) -> None:
        """Returns when the holder of this number has no lease any more; InputError when it lives."""
        first = self._bytes(number)
        if self._is_gone(number):
            return
        self._on_wait(
            f"run {self._run} was worked on by {self._read(number) or 'another process'}; without a sign of life it is "
            f"taken over in {self._expire_s:.0f} s"
        )
        deadline = time.monotonic() + self._expire_s
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._renew_s / 4))
            progress()
            if self._store.exists(_name(number + 1)) or self._is_gone(number):
                return
            if self._bytes(number) != first:
                raise self._held(self._read(number))

    def _is_gone(self, number: int) -> bool:
        """Whether the holder is known to have ended; InputError when it is known to live."""
        holder = self._read(number)
        if holder is None or holder.ended:
            return holder is not None
        if not holder.machine or holder.machine != self._machine:
            return False
        if Process(holder.pid, holder.started).find():
            raise self._held(holder)
        return True

    def _held(self, holder: Holder | None) -> InputError:
        return InputError(
            "a run that no other process works on",
            f"{holder or 'another process'} does",
            f"run {self._run} in {self._store.url}",
            "wait for it, end it, or give --run NAME",
        )

    def _keep(self) -> None:
        warned = False
        while not self._ended.wait(self._renew_s):
            try:
                self.check()
                self._own = replace(self._own, renewals=self._own.renewals + 1)
                self._write(self._own)
                warned = False
            except (RollforwardError, FileNotFoundError) as error:
                if self.lost:
                    return
                # An outage is no reason to stop: it keeps others from taking over as well.
                if not warned:
                    logger.warning("the lease of run %s could not be renewed and is tried again: %s", self._run, error)
                warned = True

    def _write(self, holder: Holder) -> None:
        self._store.write_bytes(_name(self._number), _content(holder))

    def _bytes(self, number: int) -> bytes:
        try:
            return self._store.read_bytes(_name(number))
        except FileNotFoundError:
            return b""

    def _read(self, number: int) -> Holder | None:
        """The holder of this number, None when its file is not whole yet."""
        try:
            return Holder(**json.loads(self._bytes(number)))
        except (ValueError, TypeError):
            return None


def _name(number: int) -> str:
    return f"{run_files.LEASES}/{number:06d}.json"


def _newest(store: Files) -> int:
    """The highest number, 0 when there is none."""
    number = max(
        (int(match[1]) for name in store.listdir(run_files.LEASES) if (match := _FILE.fullmatch(name))), default=0
    )
    while store.exists(_name(number + 1)):  # what a stale listing does not show
        number += 1
    return number


def _content(holder: Holder) -> bytes:
    return json.dumps(asdict(holder), indent=1).encode()
