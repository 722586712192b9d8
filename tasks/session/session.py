"""What the stages of one run share in the flow's process: its assets, its workers and its telemetry.

Stages are Prefect tasks with JSON-sized inputs; `stage` passes them the session of the flow that called them.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from transformers.utils import logging as transformers_logging

from rl_core.config.schema import RunConfig
from rl_core.errors import RollforwardError, short_message
from rl_core.runtime.watchdog import Watchdog
from rl_core.storage.status import State
from rl_core.storage.store import Store
from rl_core.trainer.failed_steps import failed_step
from tasks.registry.registry import Registry
from tasks.runs.run import Run, committed_step
from tasks.runs.signals import signals_ignored
from tasks.session.assets import RunAssets
from tasks.session.telemetry import RunTelemetry
from tasks.session.workers import RunWorkers
from tasks.tracking.run_tracking import RunTracking

logger = logging.getLogger(__name__)

_current: ContextVar["Session"] = ContextVar("session")


def current_session() -> "Session":
    """The session of the running flow."""
    return _current.get()


class Session:
    """One run in one process; workers start when a stage first needs them and end with the session."""

    def __init__(self, run: Run, verbose: bool, keep_data: bool = False) -> None:
        """Starts no worker. `keep_data`: use the run's committed rows even if the source files have changed."""
        if not verbose:
            transformers_logging.disable_progress_bar()
        self.run, self.keep_data = run, keep_data
        self.config: RunConfig = run.composed.config
        self.store: Store = run.store
        self.tracking = RunTracking(run)
        self.telemetry = RunTelemetry(run, self.tracking)
        self.console = self.telemetry.console
        self.registry = Registry(self.tracking.uri, self.config.registry.model_name)
        self.assets = RunAssets(run, self.registry, self.telemetry.warn)
        self.workers = RunWorkers(run, self.assets, self.telemetry, verbose)
        self.failures: list[str] = []
        """How each failed attempt of the current stage ended."""

    def close(self, state: State, why: str) -> None:
        """Ends the workers and records how the run ended; an error on the way does not hide how that was."""
        try:
            self.workers.drop(self.telemetry.stopping.left_s)
        except Exception as error:
            logger.warning("workers were not ended, and end with this process: %s", error)
        self.telemetry.close(state, why)
        self.run.close()

    def replay_hint(self) -> str:
        """The command that replays the step that failed; empty when none is recorded."""
        with suppress(RollforwardError):  # storage may be what has failed
            if failed := failed_step(self.store, committed_step(self.store)):
                run = self.run.url if self.config.storage.root else self.run.name
                return f"rollforward replay {run} {failed}   computes the step that failed again"
        return ""


@contextmanager
def open_session(run: Run, verbose: bool = False, keep_data: bool = False) -> Iterator[Session]:
    """The session of a flow; everything that it started is gone afterwards, and MLflow knows how the run ended."""
    session = Session(run, verbose, keep_data)
    token = _current.set(session)
    state: State = "finished"
    why = ""
    with Watchdog(session.config.trainer.silence_s, session.telemetry.on_hang):
        try:
            yield session
        except BaseException as error:
            state = "failed" if isinstance(error, Exception) else "stopped"
            why = short_message(error)
            session.telemetry.pages.line(f"✗ {state}: {why}")
            if state == "failed" and (hint := session.replay_hint()):
                error.add_note(hint)
            raise
        finally:
            with signals_ignored():
                session.close(state, why)
            _current.reset(token)
            sys.stdout.flush()
