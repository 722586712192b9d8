"""Keeps training going while MLflow fails or is slow: short probes, short timeouts, pauses."""

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
from tasks.tracking.login import register_login

logger = logging.getLogger(__name__)

LOCKED = "database is locked"
"""Part of SQLite's error message."""
_PROBE_TIMEOUT_S = 3
_SHORT_TIMEOUTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


def server_problem(uri: str) -> str | None:
    """Sends one request without retries; returns None if an MLflow server answers, else a short error message."""
    from mlflow.exceptions import MlflowException
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    register_login()
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
    # A server behind a login answers 401 or 403; the first real call checks the credentials.
    return None if answer.status_code in (200, 401, 403) else f"HTTP status {answer.status_code}"


def sqlite_problem(path: Path) -> str | None:
    """None if the file can be opened (created if missing) and locked for writing, else an error message."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path, timeout=_PROBE_TIMEOUT_S)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
    except (OSError, sqlite3.Error) as error:
        return f"{path}: {error}"
    return None


@contextmanager
def short_timeouts() -> Iterator[None]:
    """Limits MLflow requests in the block to one attempt of 10 s; MLflow reads the environment on each request."""
    before = {name: os.environ.get(name) for name in _SHORT_TIMEOUTS}
    os.environ.update(_SHORT_TIMEOUTS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class OutageGuard:
    """Keeps training going while MLflow fails; warns at the start and at the end of an outage."""

    def __init__(self, uri: str, what: str) -> None:
        """`what` names the data sent, in warnings."""
        self.uri, self.what = uri, what
        self._warned = False

    def probe(self) -> None:
        """Raises TransientError if no server answers or the file is locked; MLflow's own calls would wait longer."""
        server = self.uri.startswith("http")
        problem = server_problem(self.uri) if server else sqlite_problem(Path(self.uri.removeprefix("sqlite:///")))
        if problem:
            raise TransientError(f"MLflow at {self.uri} failed: {problem}")

    @contextmanager
    def tolerate(self) -> Iterator[None]:
        """Runs a block that sends to MLflow, with short timeouts; an error ends the block and is logged, not raised."""
        try:
            with short_timeouts():
                yield
        except RollforwardError as error:
            if not self._warned:
                logger.warning("%s are stored and sent later. %s", self.what, error)
            self._warned = True
        else:
            if self._warned:
                logger.warning("MLflow at %s is back; %s have been sent.", self.uri, self.what.lower())
            self._warned = False


class Throttle:
    """Limits the time that training spends on sending to a tenth of its total, however slow the server is."""

    SHARE = 0.1
    MIN_BLOCK_S = 1.0
    """Shorter blocks are followed by no pause."""

    def __init__(self) -> None:
        self._paused_until = -math.inf

    @property
    def ready(self) -> bool:
        """Whether the pause after the last long block is over."""
        return time.monotonic() >= self._paused_until

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measures the block and starts a pause in proportion to its duration."""
        start = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - start
            if took > self.MIN_BLOCK_S:
                self._paused_until = start + took / self.SHARE
