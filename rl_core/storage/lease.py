"""Lease on a run, kept in the run's store: prevents two processes, on any machines, from writing the same run.

Each holder creates the file with the next number, which only one process can do, and renews it while alive. The file
with the highest number names the current holder, the others past ones; a holder that finds a higher number has lost
the lease. Clocks of different machines are never compared: a holder counts as dead if its file does not change for
the expiry time, or immediately if its process has ended on this machine.
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

from rl_core.errors import InputError, RollforwardError
from rl_core.runtime.process import Process, boot_id
from rl_core.runtime.watchdog import progress
from rl_core.storage import run_files
from rl_core.storage.files import Files
from rl_core.storage.manifest import parse_json

logger = logging.getLogger(__name__)

RENEW_S = 10.0
"""Time between renewals."""
EXPIRE_S = 60.0
"""Time without a renewal after which another process takes over."""
_FILE = re.compile(r"(\d{6})\.json")


@dataclass(frozen=True)
class Holder:
    """Content of a lease file; `since` is the holder's clock, `machine` identifies the process-id namespace."""

    token: str
    host: str
    machine: str
    pid: int
    started: str
    since: str
    renewals: int = 0
    ended: bool = False

    @classmethod
    def of_this_process(cls, machine: str) -> "Holder":
        """This process as a holder, with a new token."""
        process = Process.of(os.getpid())
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        return cls(uuid.uuid4().hex, socket.gethostname(), machine, process.pid, process.started, since)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


def this_machine() -> str:
    """Identifier that differs between machines, reboots and containers; empty if the system does not provide it."""
    with suppress(OSError):
        if boot := boot_id():
            return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


class Fence:
    """Whether a lease is still that of the run's current holder; can be checked from any process, on any machine."""

    def __init__(self, store: Files, run: str, number: int, expire_s: float) -> None:
        """The lease with this number, on the run whose folder is `store`, taken over after `expire_s`."""
        self._store, self._run, self.number, self._expire_s = store, run, number, expire_s
        self._lost: InputError | None = None

    @property
    def lost(self) -> bool:
        """Whether another process is known to have taken over."""
        return self._lost is not None

    def check(self) -> None:
        """Reads the store; raises InputError if another process has taken over."""
        if self._lost is None and self._store.exists(_name(self.number + 1)):
            holder = _read(self._store, _newest(self._store))
            self._lost = InputError(
                expected=f"this process to hold the lease of run {self._run}",
                seen=f"{holder or 'another process'} has taken over: the lease was not renewed for "
                f"{self._expire_s:.0f} s",
                where=self._store.url,
                fix="leave the run to that process; if it has ended, run the same command again to continue from the "
                "last committed step",
            )
        if self._lost is not None:
            raise self._lost


class Lease(Fence):
    """The right to write a run, from construction until `end` or until another process takes over.

    A pickled lease is the fence of its holder: other processes check it, and do not renew it.
    """

    def __init__(
        self,
        store: Files,
        run: str,
        on_wait: Callable[[str], None] = logger.warning,
        renew_s: float = RENEW_S,
        expire_s: float = EXPIRE_S,
        machine: str | None = None,
    ) -> None:
        """Acquires the lease of a run, whose folder is `store`, and keeps renewing it.

        Raises InputError if another process holds it. If that is unknown, this waits for up to `expire_s` and first
        calls `on_wait` with a message. `machine` identifies this process's machine (default: `this_machine()`).
        """
        super().__init__(store, run, 0, expire_s)
        self._on_wait, self._renew_s = on_wait, renew_s
        self._machine = this_machine() if machine is None else machine
        self._own = Holder.of_this_process(self._machine)
        self._ended = threading.Event()
        self.number = self._take()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def __reduce__(self) -> tuple[type[Fence], tuple[Files, str, int, float]]:
        return Fence, (self._store, self._run, self.number, self._expire_s)

    def end(self) -> None:
        """Releases the lease, unless another process has taken over."""
        self._ended.set()
        self._thread.join()
        with suppress(RollforwardError):  # it will expire
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
        """Returns once the holder of this number has lost the lease; raises InputError if it is alive."""
        first = _bytes(self._store, number)
        if self._is_gone(number):
            return
        holder = _read(self._store, number) or "another process"
        self._on_wait(
            f"run {self._run} is held by {holder}; unless that renews its lease, the run is taken over in "
            f"{self._expire_s:.0f} s"
        )
        deadline = time.monotonic() + self._expire_s
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._renew_s / 4))
            progress()
            if self._store.exists(_name(number + 1)) or self._is_gone(number):
                return
            if _bytes(self._store, number) != first:
                raise self._held(_read(self._store, number))

    def _is_gone(self, number: int) -> bool:
        """Whether the holder is known to have ended; raises InputError if it is known to be alive."""
        holder = _read(self._store, number)
        if holder is None or holder.ended:
            return holder is not None
        # An earlier version recorded the start in seconds since the epoch, which depends on the clock.
        if not holder.machine or holder.machine != self._machine or not isinstance(holder.started, str):
            return False
        if Process(holder.pid, holder.started).find():
            raise self._held(holder)
        return True

    def _held(self, holder: Holder | None) -> InputError:
        return InputError(
            expected="a run that no other process is working on",
            seen=f"it is held by {holder or 'another process'}",
            where=f"run {self._run} in {self._store.url}",
            fix="wait for that process, stop it, or use another run with --run NAME",
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
                # Continue during an outage: it prevents other processes from taking over, too.
                if not warned:
                    logger.warning("the lease of run %s could not be renewed; retrying: %s", self._run, error)
                warned = True

    def _write(self, holder: Holder) -> None:
        self._store.write_bytes(_name(self.number), _content(holder))


def _name(number: int) -> str:
    return f"{run_files.LEASES}/{number:06d}.json"


def _bytes(store: Files, number: int) -> bytes:
    try:
        return store.read_bytes(_name(number))
    except FileNotFoundError:
        return b""


def _read(store: Files, number: int) -> Holder | None:
    """The holder of this number, None if its file is not complete yet."""
    try:
        return Holder(**parse_json(_bytes(store, number)))
    except (ValueError, TypeError):
        return None


def _newest(store: Files) -> int:
    """The highest number, 0 if there is none."""
    number = max(
        (int(match[1]) for name in store.listdir(run_files.LEASES) if (match := _FILE.fullmatch(name))), default=0
    )
    while store.exists(_name(number + 1)):  # a stale listing may not show it
        number += 1
    return number


def _content(holder: Holder) -> bytes:
    return json.dumps(asdict(holder), indent=1).encode()
