"""How training goes on while MLflow fails or is slow: short probes, short calls, rests."""

import logging
import math
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from rl_core.errors import RollforwardError, TransientError

logger = logging.getLogger(__name__)

LOCKED = "database is locked"
"""SQLite's words."""
_PROBE_TIMEOUT_S = 3
_BRIEF = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


def server_problem(uri: str) -> str | None:
    """One request without retries; None when an MLflow server answers, else what is wrong in a few words."""
    from mlflow.exceptions import MlflowException
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    try:
        answer = http_request(
            get_default_host_creds(uri.rstrip("/")), "/health", "GET",
            max_retries=0, timeout=_PROBE_TIMEOUT_S, raise_on_status=False,
        )  # fmt: skip
    except (MlflowException, OSError) as error:
        reason = re.search(r"\[Errno -?\d+\] ([\w ,-]+)", str(error))
        if reason:
            return reason.group(1).lower()
        return f"no answer within {_PROBE_TIMEOUT_S} s" if "timed out" in str(error) else str(error)
    # A server behind a login answers 401 or 403 here; its credentials are checked by the first real call.
    return None if answer.status_code in (200, 401, 403) else f"an answer with HTTP status {answer.status_code}"


def sqlite_problem(path: Path) -> str | None:
    """None when the file can be opened and locked for writing (made if missing), else what is wrong."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path, timeout=_PROBE_TIMEOUT_S)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
    except (OSError, sqlite3.Error) as error:
        return f"{path}: {error}"
    return None


@contextmanager
def brief_calls() -> Iterator[None]:
    """Calls to a server that are tried once and have 10 s: MLflow reads its limits from the environment each time."""
    before = {name: os.environ.get(name) for name in _BRIEF}
    os.environ.update(_BRIEF)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Outage:
    """Lets training go on while MLflow fails; warns when that begins and when it is over."""

    def __init__(self, uri: str, what: str) -> None:
        """`what` names in the warning what is sent."""
        self.uri, self.what = uri, what
        self._warned = False

    def probe(self) -> None:
        """Raises TransientError while no server answers or the file is locked: MLflow's own calls would wait longer."""
        server = self.uri.startswith("http")
        problem = server_problem(self.uri) if server else sqlite_problem(Path(self.uri.removeprefix("sqlite:///")))
        if problem:
            raise TransientError(f"MLflow at {self.uri} failed: {problem}")

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Sending to MLflow; an error ends the block and is only warned about. No call is tried twice or waits long."""
        try:
            with brief_calls():
                yield
        except RollforwardError as error:
            if not self._warned:
                logger.warning("%s are kept and sent later. %s", self.what, error)
            self._warned = True
        else:
            if self._warned:
                logger.warning("MLflow at %s is back; %s were sent.", self.uri, self.what.lower())
            self._warned = False


class Pace:
    """Keeps what training waits for beside its own work to a tenth of the time, however slow a server is."""

    SHARE = 0.1
    FREE_S = 1.0
    """A block that is shorter needs no rest."""

    def __init__(self) -> None:
        self._rests_until = -math.inf

    @property
    def due(self) -> bool:
        """Whether the rest after the last long block is over."""
        return time.monotonic() >= self._rests_until

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A block after which a rest in proportion to its length begins."""
        start = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - start
            if took > self.FREE_S:
                self._rests_until = start + took / self.SHARE
