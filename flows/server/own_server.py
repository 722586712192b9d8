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
from pathlib import Path

from flows.server.prefect_api import request_json
from rl_core.errors import TransientError
from tasks.prefect_server.own_server import OWN_SERVER

START_S = 120.0
"""Maximum time for the server to start; the first start in a home folder creates the database."""
STOP_S = 5.0
"""Maximum wait for the server to end by itself: it may be creating the database."""
_SETTINGS = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
"""Environment of the servers that Prefect starts itself for a single run."""


def start_server(home: Path, new: bool = False) -> "OwnServer | None":
    """Starts the server of a run in this home folder, unless PREFECT_API_URL names another one.

    Without `new` only if it need not create its database, which must not be interrupted.
    """
    if os.environ.get("PREFECT_API_URL") or not (new or (home / "prefect" / "prefect.db").exists()):
        return None
    return OwnServer()


class OwnServer:
    """A Prefect server on a port of the loopback address, which requires PREFECT_SERVER_API_AUTH_STRING."""

    def __init__(self) -> None:
        """Starts the server and names it in PREFECT_API_URL; returns at once. Must precede the import of Prefect."""
        with socket.create_server(("127.0.0.1", 0)) as listener:  # requests wait in it until the server has started
            command = [
                *(sys.executable, "-m", "uvicorn", "--app-dir", sysconfig.get_paths()["purelib"]),
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
            with suppress(OSError, ValueError):
                request_json(f"{self.url}/health")
                return
        code = self._process.poll()
        how = f"did not answer within {START_S:.0f} s" if code is None else f"ended with exit code {code}"
        raise TransientError(f"the Prefect server {how}; no stage was started")

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
