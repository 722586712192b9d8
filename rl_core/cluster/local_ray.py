"""A Ray of this machine alone, for one run, which starts in the background in a process of its own."""

import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import psutil

from rl_core.errors import TransientError
from rl_core.runtime.private import private_folder
from rl_core.runtime.watchdog import progress

LONGEST_RAY_FOLDER = 40
"""Maximum path length: Unix sockets are limited to 107 characters, and Ray appends about 65."""
START_S = 180.0
"""Maximum time for Ray to start."""
POLL_S = 0.25
"""Longest time without a sign of progress while Ray starts."""
STOP_S = 10.0
"""Maximum wait for killed processes."""
STOP_POLL_S = 0.05
"""Time between two looks for processes that are left: a process may start another one just before it ends."""
QUOTED = 1000
"""Characters of Ray's last messages in an error."""


class LocalRay:
    """Ray's processes, from the construction of this object to `stop`."""

    def __init__(self, home: Path, slots: int) -> None:
        """Starts Ray below `home` with one CPU per slot, and returns at once.

        The variables of `flows.home.prepare_environment` must be set.
        """
        # Ray keeps one process per CPU ready for workers; that is as many as the run needs.
        folder = _ray_folder(home)
        options = {"num_cpus": slots, "include_dashboard": False, "_temp_dir": str(folder)}
        script = Path(__file__).with_name("ray_process.py")
        self._address = ""
        self._messages = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed by `stop`
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            bufsize=0,  # `select` sees no line that waits in a buffer
            start_new_session=True,
        )
        atexit.register(self.stop)

    def address(self) -> str:
        """The address of the cluster, once it has started; raises TransientError if it does not start."""
        assert self._process.stdout is not None
        end = time.monotonic() + START_S
        while not self._address:
            if select.select([self._process.stdout], [], [], POLL_S)[0]:
                line = self._process.stdout.readline()
                answer = _answer(line) if line else {"problem": "its process ended"}
                if "problem" in answer:
                    raise TransientError(f"Ray failed to start: {answer['problem']}{self._last_messages()}")
                self._address = answer.get("address", "")
            elif time.monotonic() > end:
                raise TransientError(f"Ray did not start within {START_S:.0f} s{self._last_messages()}")
            progress()
        return self._address

    def stop(self) -> None:
        """Kills all processes of this Ray, also those whose parents have ended; nothing that they hold outlives the
        run."""
        if self._process.returncode is not None:  # stopped before
            return
        end = time.monotonic() + STOP_S
        while (found := self._processes()) and time.monotonic() < end:
            for each in found:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            time.sleep(STOP_POLL_S)
        self._process.wait()  # only now: until then no other process can get the number of the session
        for file in (self._process.stdin, self._process.stdout, self._messages):
            assert file is not None
            with suppress(OSError):
                file.close()

    def _processes(self) -> list[psutil.Process]:
        """The processes of Ray's session that have not ended, and those that descend from them."""
        found: list[psutil.Process] = []
        children: dict[int, list[psutil.Process]] = defaultdict(list)
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):  # has just ended
                if process.status() != psutil.STATUS_ZOMBIE:
                    children[process.ppid()].append(process)
                    if os.getsid(process.pid) == self._process.pid:
                        found.append(process)
        for process in found:
            found += [child for child in children[process.pid] if child not in found]
        return found

    def _last_messages(self) -> str:
        """The end of what Ray's process has written to stderr, to follow an error; empty if that is nothing."""
        file = self._messages.fileno()
        start = max(os.fstat(file).st_size - QUOTED, 0)
        # Not `seek`: Ray's process writes at the same position of the file.
        text = os.pread(file, QUOTED, start).decode(errors="replace").strip()
        return f"; its last messages:\n{text}" if text else ""


def _answer(line: bytes) -> dict[str, str]:
    """What Ray's process says in a line: its `address`, a `problem`, or neither in the output of a library."""
    with suppress(ValueError):
        answer = json.loads(line)
        if isinstance(answer, dict):
            return {key: str(answer[key]) for key in ("address", "problem") if key in answer}
    return {}


def _ray_folder(home: Path) -> Path:
    """The folder of Ray's sockets and logs, which Ray opens to all users: it lies in a folder that only this user can
    enter."""
    folder = home / "ray"
    if len(str(folder)) > LONGEST_RAY_FOLDER:
        folder = private_folder(Path(tempfile.gettempdir()) / f"rollforward-{os.geteuid()}") / "ray"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
