"""A Ray of this machine alone, for one run, which starts in the background in a process of its own."""

import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
import time
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


class LocalRay:
    """Ray's processes, from the construction of this object to `stop`."""

    def __init__(self, home: Path, slots: int) -> None:
        """Starts Ray below `home` with one CPU per slot, and returns at once.

        The variables of `flows.home.prepare_environment` must be set.
        """
        # Ray keeps one process per CPU ready for workers; that is as many as the run needs.
        options = {"num_cpus": slots, "include_dashboard": False, "_temp_dir": str(_ray_folder(home))}
        script = Path(__file__).with_name("ray_process.py")
        self._address = ""
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        atexit.register(self.stop)

    def address(self) -> str:
        """The address of the cluster, once it has started; raises TransientError if it does not start."""
        assert self._process.stdout is not None
        end = time.monotonic() + START_S
        while not self._address:
            if select.select([self._process.stdout], [], [], POLL_S)[0]:
                answer = json.loads(self._process.stdout.readline() or '{"problem": "its process ended"}')
                if "problem" in answer:
                    raise TransientError(f"Ray failed to start: {answer['problem']}")
                self._address = answer["address"]
            elif time.monotonic() > end:
                raise TransientError(f"Ray did not start within {START_S:.0f} s")
            progress()
        return self._address

    def stop(self) -> None:
        """Kills all processes; nothing that they hold outlives the run."""
        if self._process.poll() is not None:  # then the kernel has killed its children
            return
        process = psutil.Process(self._process.pid)
        found = [process, *process.children(recursive=True)]
        for each in found:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self._process.wait()
        psutil.wait_procs(found, timeout=STOP_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()


def _ray_folder(home: Path) -> Path:
    """The folder of Ray's sockets and logs, which Ray opens to all users: it lies in a folder that only this user can
    enter."""
    folder = home / "ray"
    if len(str(folder)) > LONGEST_RAY_FOLDER:
        folder = private_folder(Path(tempfile.gettempdir()) / f"rollforward-{os.geteuid()}") / "ray"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
