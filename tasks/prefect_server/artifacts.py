"""A run on Prefect's pages: terminal lines as logs, and progress, tables and links as artifacts.

Nothing is sent to the run's own server, which ends with the run. Errors of Prefect's server never fail a run; after
one, no artifacts are sent for a while.
"""

import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.logging.handlers import APILogHandler

from tasks.prefect_server.own_server import has_pages

logger = logging.getLogger(__name__)

UPDATE_INTERVAL_S = 3.0
"""Minimum time between two updates of the progress."""
PAUSE_S = 300.0
"""Time without artifacts after a failure, so that not every step waits for the client's retries."""


class PrefectPages:
    """Logs and artifacts of the flow run in this process."""

    def __init__(self, run: str) -> None:
        """`run` is the name of the run, the prefix of all artifact keys."""
        self.enabled = has_pages()
        self._key = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
        self._progress: UUID | None = None
        self._updated = self._paused_until = -math.inf

    def log_line(self, text: str) -> None:
        """Sends a line of the terminal to the flow run's logs."""
        if self.enabled and text.strip():
            _lines().info(text)

    def progress(self, step: int, steps: int, text: str) -> None:
        """Updates the progress artifact, at most once per `UPDATE_INTERVAL_S` and at the last step."""
        now = time.monotonic()
        if step < steps and now < self._updated + UPDATE_INTERVAL_S:
            return
        self._updated = now
        percent = 100.0 * step / steps
        if self._progress is None:
            key = f"{self._key}-progress"
            self._progress = self._sent(lambda: create_progress_artifact(percent, key=key, description=text))
        else:
            update = self._progress
            self._sent(lambda: update_progress_artifact(update, percent, description=text))

    def table(self, name: str, rows: Sequence[dict[str, Any]], text: str) -> None:
        """Creates a table artifact with the key `<run>-<name>`; the keys of the rows are its columns."""
        self._sent(lambda: create_table_artifact(list(rows), key=f"{self._key}-{name}", description=text))

    def markdown(self, name: str, markdown: str, text: str) -> None:
        """Creates a Markdown artifact with the key `<run>-<name>`."""
        self._sent(lambda: create_markdown_artifact(markdown, key=f"{self._key}-{name}", description=text))

    def _sent(self, send: Callable[[], Any]) -> Any:
        if not self.enabled or time.monotonic() < self._paused_until:
            return None
        try:
            return send()
        except Exception as error:  # servers, proxies and Prefect's client raise errors of many types
            logger.warning("Prefect artifacts are paused for %.0f s: %s", PAUSE_S, type(error).__name__)
            self._paused_until = time.monotonic() + PAUSE_S
            return None


def _lines() -> logging.Logger:
    """A logger that only sends to Prefect's API: Prefect's own loggers also print to the terminal."""
    lines = logging.getLogger("rollforward.lines")
    if not lines.handlers:
        lines.addHandler(APILogHandler())
        lines.setLevel(logging.INFO)
        lines.propagate = False
    return lines
