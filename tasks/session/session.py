"""The objects that the stages of one run share in the flow's process: assets, workers, tracking and telemetry.

Stages are Prefect tasks with small JSON inputs; the decorator `stage` passes them the session of the calling flow.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from transformers.utils import logging as transformers_logging

from rl_core.cluster.local_ray import LocalRay
from rl_core.config.schema import RunConfig
from rl_core.errors import InputError, RollforwardError, short_message
from rl_core.runtime.watchdog import Watchdog
from rl_core.storage.status import State
from rl_core.storage.store import Store
from rl_core.trainer.failed_steps import failed_step
from tasks.registry.registry import Registry
from tasks.runs.open_run import has_started
from tasks.runs.run import Run, committed_step
from tasks.runs.signals import ignore_signals
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

    def __init__(self, run: Run, verbose: bool, keep_data: bool = False, local_ray: LocalRay | None = None) -> None:
        """Starts no worker. `keep_data`: use the run's committed rows even if the source files have changed.
        `local_ray`: a Ray for the workers that is starting already; it ends with the session."""
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
        self.workers = RunWorkers(run, self.assets, self.telemetry, verbose, local_ray)
        self.failures: list[str] = []
        """A short description of each failed attempt of the current stage."""

    def close(self, state: State, why: str, refused: bool = False) -> None:
        """Stops the workers and records the state in which the run ended, even if stopping them fails.

        A run that this process began is removed if it was `refused` as the user's error before it committed its rows.
        """
        try:
            self.workers.drop(self.telemetry.stopping.grace_left_s)
        except Exception as error:
            logger.warning("workers could not be stopped; they end with this process: %s", error)
        discard = False
        try:
            self.telemetry.close(state, why)
            with suppress(RollforwardError):  # the failure may be the storage's
                discard = refused and not has_started(self.store)
        finally:
            self.run.close(discard)

    def replay_hint(self) -> str:
        """The command that replays the failed step; empty if none is recorded."""
        with suppress(RollforwardError):  # the failure may be the storage's
            if failed := failed_step(self.store, committed_step(self.store)):
                run = self.run.url if self.config.storage.root else self.run.name
                return f"to replay the failed step: rollforward replay {run} {failed}"
        return ""


@contextmanager
def open_session(
    run: Run, verbose: bool = False, keep_data: bool = False, local_ray: LocalRay | None = None
) -> Iterator[Session]:
    """The session of a flow; at the end it stops everything that it started and records the run's state in MLflow."""
    session = Session(run, verbose, keep_data, local_ray)
    token = _current.set(session)
    state: State = "finished"
    why, refused = "", False
    with Watchdog(session.config.trainer.silence_s, session.telemetry.on_hang):
        try:
            yield session
        except BaseException as error:
            state = "failed" if isinstance(error, Exception) else "stopped"
            why, refused = short_message(error), isinstance(error, InputError)
            session.telemetry.pages.log_line(f"✗ {state}: {why}")
            if state == "failed" and (hint := session.replay_hint()):
                error.add_note(hint)
            raise
        finally:
            with ignore_signals():
                session.close(state, why, refused)
            _current.reset(token)
            sys.stdout.flush()
