"""What training reports to its caller while it runs."""

import logging
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class RunObserver(Protocol):
    """Receives the progress of training; `NullObserver` has defaults for every method."""

    def on_step(self, record: dict[str, Any]) -> None:
        """Receives each step's ledger record."""

    def on_phase(self, step: int, phase: str) -> None:
        """Receives the name of each phase of a step as it starts."""

    def on_commit(self, step: int) -> None:
        """Receives the newest step that a checkpoint covers, after its manifest is written."""

    def on_damage(self, message: str) -> None:
        """Receives a message for every checkpoint that is skipped as damaged."""

    def should_stop(self) -> bool:
        """Whether the current step is the last one."""


class NullObserver(RunObserver):
    """Ignores progress, logs damaged checkpoints, and never stops training."""

    def on_step(self, record: dict[str, Any]) -> None:
        """Does nothing."""

    def on_phase(self, step: int, phase: str) -> None:
        """Does nothing."""

    def on_commit(self, step: int) -> None:
        """Does nothing."""

    def on_damage(self, message: str) -> None:
        """Logs the message as an error."""
        logger.error(message)

    def should_stop(self) -> bool:
        """False."""
        return False
