"""What Prefect's pages show of a run: its lines as logs, its progress, tables and links.

Without a server of its own (`PREFECT_API_URL`) nobody could look at them, and nothing is sent. What Prefect's server
does fails no run: after a failure the pages are left alone for a while.
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
from prefect.settings import PREFECT_API_URL

logger = logging.getLogger(__name__)

EVERY_S = 3.0
"""Least time between two updates of the progress."""
REST_S = 300.0
"""Time without artifacts after a failure: not every step shall sit through the client's retries."""


class PrefectPages:
    """The pages of the flow run that this process works on."""

    def __init__(self, run: str) -> None:
        """Artifacts have keys that begin with the name of the run."""
        self.shown = bool(PREFECT_API_URL.value())
        self._key = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
        self._progress: UUID | None = None
        self._updated = self._rests_until = -math.inf

    def line(self, text: str) -> None:
        """A line of the terminal, on the page of logs too."""
        if self.shown and text.strip():
            _lines().info(text)

    def progress(self, step: int, steps: int, text: str) -> None:
        """How far training is; passed over while the last update is young, except at the end."""
        now = time.monotonic()
        if step < steps and now < self._updated + EVERY_S:
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
        """A table under the key `<run>-<name>`; the rows' keys are its columns."""
        self._sent(lambda: create_table_artifact(list(rows), key=f"{self._key}-{name}", description=text))

    def markdown(self, name: str, markdown: str, text: str) -> None:
        """A Markdown text under the key `<run>-<name>`."""
        self._sent(lambda: create_markdown_artifact(markdown, key=f"{self._key}-{name}", description=text))

    def _sent(self, send: Callable[[], Any]) -> Any:
        if not self.shown or time.monotonic() < self._rests_until:
            return None
        try:
            return send()
        except Exception as error:  # whatever a server, a proxy or Prefect's client makes of it
            logger.warning("Prefect's pages are left alone for %.0f s: %s", REST_S, type(error).__name__)
            self._rests_until = time.monotonic() + REST_S
            return None


def _lines() -> logging.Logger:
    """A logger that sends to Prefect's API alone: Prefect's own ones print on the terminal too."""
    lines = logging.getLogger("rollforward.lines")
    if not lines.handlers:
        lines.addHandler(APILogHandler())
        lines.setLevel(logging.INFO)
        lines.propagate = False
    return lines
