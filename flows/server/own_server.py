"""Starts the Prefect server of a single run in the background, faster than Prefect does.

The run's process needs none of the server's code, and imports its own meanwhile.
"""

import atexit
import os
import socket
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from http.client import HTTPException
from importlib.metadata import version
from pathlib import Path

from flows.server.prefect_api import request_json
from rl_core.errors import TransientError
from tasks.prefect_server.own_server import OWN_SERVER

START_S = 120.0
"""Maximum time for the server to start; the first start in a home folder creates the database."""
POLL_S = 0.1
"""Time between two questions whether it has started: it may answer with an error at once."""
STOP_S = 5.0
"""Maximum wait for the server to end by itself: it may be creating the database."""
READY = "ready"
"""File beside the database, with the version of Prefect whose server has started on it."""
_SETTINGS = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
"""Environment of the servers that Prefect starts itself for a single run."""


def start_server(home: Path, new: bool = False) -> "OwnServer | None":
    """Starts the server of a run in this home folder, unless PREFECT_API_URL names another one.

    Unless `new`, starts only if this version of Prefect has used the database: to create or migrate it must not be
    interrupted.
    """
    folder = home / "prefect"
    if os.environ.get("PREFECT_API_URL") or not (new or _is_ready(folder)):
        return None
    return OwnServer(folder)


def _is_ready(folder: Path) -> bool:
    """Whether a server of the installed version has started on the database in this folder."""
    with suppress(OSError, ValueError):
        return (folder / "prefect.db").exists() and (folder / READY).read_text() == version("prefect")
    return False


class OwnServer:
    """A Prefect server on a port of the loopback address, which requires PREFECT_SERVER_API_AUTH_STRING."""

    def __init__(self, folder: Path) -> None:
        """Starts the server, whose database is in `folder`, and names it in PREFECT_API_URL; returns at once. Must
        precede the import of Prefect."""
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as listener:  # requests wait in it until the server has started
            command = [
                *(sys.executable, "-P", "-m", "uvicorn", "--app-dir", sysconfig.get_paths()["purelib"]),
                *("--factory", "prefect.server.api.server:create_app", "--fd", str(listener.fileno())),
                *("--log-level", "error", "--lifespan", "on"),
            ]
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **_SETTINGS},
                stdin=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # signals to the run's process group do not reach it: it outlives the run
            )
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        os.environ["PREFECT_API_URL"] = os.environ[OWN_SERVER] = self.url
        atexit.register(self.stop)  # runs after the handlers of Prefect's client, which is imported later

    def wait(self) -> None:
        """Waits until the server answers; raises TransientError if it does not start."""
        end = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < end:
            if self._answers():
                with suppress(OSError):  # the next one starts later, then
                    (self._folder / READY).write_text(version("prefect"))
                return
            time.sleep(POLL_S)
        code = self._process.poll()
        how = f"did not answer within {START_S:.0f} s" if code is None else f"ended with exit code {code}"
        raise TransientError(f"the Prefect server {how}; no stage was started")

    def _answers(self) -> bool:
        with suppress(OSError, ValueError, HTTPException):
            request_json(f"{self.url}/health")
            return True
        return False

    def stop(self) -> None:
        """Ends the server."""
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
