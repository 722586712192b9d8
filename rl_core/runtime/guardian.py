"""A process that outlives its run for a moment: however the run ended, what it has started ends too.

Everything that a process starts inherits its environment, so what belongs to a run is found by a token in there,
whoever is its parent by then, and its temporary folders by the same token in their names. The guardian learns of the
end from the kernel: its standard input ends.
"""

import os
import re
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
"""Variable that holds the token of the process that began a run."""
WAIT_S = 3.0
"""Time that processes have to end by themselves, and after being asked to."""
ROUNDS = 5
"""Times that it looks again: what ends may just have started something."""
SEMAPHORES = Path("/dev/shm")
_STAGING = re.compile(r"rollforward-([0-9a-f]{32})-")
_GUARDIAN = "guardian of "
"""Stands before the token in a guardian's own environment."""


def start_guardian() -> None:
    """Everything that this process starts from now on ends with it; to be called once, before anything is started."""
    token = os.environ[TOKEN] = uuid.uuid4().hex
    subprocess.Popen(
        [sys.executable, "-m", "rl_core.runtime.guardian"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,  # never written to, and open as long as this process lives
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not for it
        env={**os.environ, TOKEN: f"{_GUARDIAN}{token}"},
    )


def is_guardian(process: psutil.Process) -> bool:
    """Whether the process is a run's guardian: it ends by itself when it has done its work, and not before."""
    with suppress(psutil.Error):
        token: str = process.environ().get(TOKEN, "")
        return token.startswith(_GUARDIAN)
    return False


def staging(beside: Path | None = None) -> "tempfile.TemporaryDirectory[str]":
    """A temporary folder that goes with the run, also when the process that made it is killed.

    With `beside` it is in that folder, from which a file may be moved into place; what a killed run left there goes
    when the next one is made.
    """
    for path in beside.iterdir() if beside else ():
        if (token := _STAGING.match(path.name)) and not family(_GUARDIAN + token[1]):
            shutil.rmtree(path, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix=_prefix(os.environ.get(TOKEN, "")), dir=beside)


def family(token: str) -> list[psutil.Process]:
    """The processes that have the token."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # gone meanwhile, or another user's
            if process.environ().get(TOKEN) == token and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_family(token: str) -> None:
    """Waits a moment for the processes to end, then asks them, then kills them."""
    _gone(token)
    for process in family(token):
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    for _ in range(ROUNDS):
        if _gone(token):
            break
        for process in family(token):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def remove_semaphores() -> None:
    """Removes the named semaphores of joblib's processes that are gone; one that is killed leaves its own behind."""
    for path in SEMAPHORES.glob("sem.loky-*"):
        number = path.name.split("-")[1]
        with suppress(OSError):
            if number.isdecimal() and not psutil.pid_exists(int(number)) and path.stat().st_uid == os.getuid():
                path.unlink()


def remove_staging(token: str) -> None:
    """Removes the temporary folders that a run with this token has left."""
    for path in Path(tempfile.gettempdir()).glob(f"{_prefix(token)}*"):
        shutil.rmtree(path, ignore_errors=True)


def _prefix(token: str) -> str:
    return f"rollforward-{token}-"


def _gone(token: str) -> bool:
    end = time.monotonic() + WAIT_S
    while family(token):
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


if __name__ == "__main__":
    sys.stdin.buffer.read()
    ended = os.environ[TOKEN].rpartition(" ")[2]
    end_family(ended)
    remove_staging(ended)
    remove_semaphores()
