"""A process that briefly outlives its run and ends everything the run started, however the run ended.

Child processes inherit the environment, so the guardian finds the run's processes by a token in it, whatever their
parent is by then, and the run's temporary folders by the same token in their names. A fork of the run's process shows
the environment with which that was started, but holds the pipe to the guardian. The kernel reports the end of the run.
"""

import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

TOKEN = "ROLLFORWARD_TOKEN"
"""Variable that holds the token of the process that started a run."""
WAIT_S = 3.0
"""Time for processes to end by themselves, and again after SIGTERM."""
ROUNDS = 5
"""Maximum rounds of SIGKILL: a process may start another one just before it ends."""
SEMAPHORES = Path("/dev/shm")
_STAGING = re.compile(r"rollforward-([0-9a-f]{32})-")
_GUARDIAN = "guardian of "
"""Prefix of the token in a guardian's own environment."""


def start_guardian() -> None:
    """Starts the guardian of this process; call once, before starting any other process."""
    token = os.environ[TOKEN] = uuid.uuid4().hex
    # Not end-of-file of the pipe: that comes only when the last fork of this process has ended.
    own = os.pidfd_open(os.getpid())
    subprocess.Popen(
        [sys.executable, "-m", "rl_core.runtime.guardian", str(own)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,  # never written to
        pass_fds=[own],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that Ctrl-C does not reach it
        env={**os.environ, TOKEN: f"{_GUARDIAN}{token}"},
    )
    os.close(own)


def is_guardian(process: psutil.Process) -> bool:
    """Whether the process is a run's guardian, which must be left to finish and ends by itself."""
    with suppress(psutil.Error):
        token: str = process.environ().get(TOKEN, "")
        return token.startswith(_GUARDIAN)
    return False


def staging(beside: Path | None = None) -> "tempfile.TemporaryDirectory[str]":
    """A temporary folder that is removed with the run, even if the process that created it is killed.

    With `beside` it is created in that folder, so that files can be renamed into place; folders left there by killed
    runs are removed by the next call.
    """
    for path in beside.iterdir() if beside else ():
        if (token := _STAGING.match(path.name)) and not family(_GUARDIAN + token[1]):
            shutil.rmtree(path, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix=_prefix(os.environ.get(TOKEN, "")), dir=beside)


def family(token: str, pipe: str = "") -> list[psutil.Process]:
    """The processes with this token in their environment, and the other ones that hold this pipe (`pipe:[123]`)."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # has just ended, or belongs to another user
            belongs = process.environ().get(TOKEN) == token or (pipe and _holds(process.pid, pipe))
            if belongs and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _holds(pid: int, pipe: str) -> bool:
    """Whether another process holds this pipe."""
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for descriptor in os.listdir(folder) if pid != os.getpid() else ():
            with suppress(FileNotFoundError):  # has just been closed
                if os.readlink(f"{folder}/{descriptor}") == pipe:
                    return True
    return False


def end_family(token: str, pipe: str = "") -> None:
    """Waits WAIT_S for the processes of `family` to end, then sends SIGTERM, then SIGKILL."""
    _gone(token, pipe)
    for process in family(token, pipe):
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    for _ in range(ROUNDS):
        if _gone(token, pipe):
            break
        for process in family(token, pipe):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def remove_semaphores() -> None:
    """Removes the named semaphores of dead joblib processes; a killed process does not remove its own."""
    for path in SEMAPHORES.glob("sem.loky-*"):
        number = path.name.split("-")[1]
        with suppress(OSError):
            if number.isdecimal() and not psutil.pid_exists(int(number)) and path.stat().st_uid == os.getuid():
                path.unlink()


def remove_staging(token: str) -> None:
    """Removes the temporary folders left by the run with this token."""
    for path in Path(tempfile.gettempdir()).glob(f"{_prefix(token)}*"):
        shutil.rmtree(path, ignore_errors=True)


def _prefix(token: str) -> str:
    return f"rollforward-{token}-"


def _gone(token: str, pipe: str) -> bool:
    end = time.monotonic() + WAIT_S
    while family(token, pipe):
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


if __name__ == "__main__":
    select.select([int(sys.argv[1])], [], [])  # readable once the process has ended
    ended = os.environ[TOKEN].rpartition(" ")[2]
    end_family(ended, os.readlink("/proc/self/fd/0"))
    remove_staging(ended)
    remove_semaphores()
