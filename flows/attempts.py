"""Start of a flow in a worker: environment, earlier attempts of the flow run, and conflicting trainings.

Prefect restarts a flow run after a crash. Later attempts reuse the decisions of the first one, and kill a process of
an earlier attempt that is still alive: it may only have lost its connection to the server.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName, FlowRunFilter, FlowRunFilterState
from prefect.client.schemas.filters import FlowRunFilterStateType as StateFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run

from flows.first_checks import watch_for_hang
from flows.home import prepare_home
from flows.server.services import stop_processes
from rl_core.config.schema import RunConfig
from rl_core.errors import TrainingError, TransientError
from rl_core.runtime.guardian import start_guardian
from rl_core.runtime.process import Process
from rl_core.runtime.watchdog import progress
from rl_core.storage.store import Store
from tasks.runs.run import runs_root

Answer = TypeVar("Answer")

TRAININGS = ["post-train", "retrain"]
"""Flows of which only one may run at a time in a work pool."""
RECHECK_DELAY_S = 1.0
RETRY_DELAYS_S = (10.0, 30.0, 60.0, 120.0)
"""Waits between retries outside of stages, long enough for a restart of MLflow or of the storage."""


@dataclass(frozen=True)
class Attempt:
    """The attempt of a flow run in this process."""

    home: Path
    flow_run: str
    number: int
    """1 for the first attempt."""

    def decide_once(self, config: RunConfig, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The decision of the first attempt, as JSON; transient errors of storage and MLflow are retried.

        It is stored next to the runs, where attempts on other machines find it.
        """
        store, file = runs_root(config.storage, self.home).child("attempts"), f"{self.flow_run}.json"

        def decided() -> dict[str, Any]:
            if not store.exists(file):
                store.write_json(file, decide())
            stored: dict[str, Any] = store.read_json(file)
            return stored

        with watch_for_hang(config):
            return retry_transient(decided)

    def run_name(self, recipe: str) -> str:
        """A name for a run of the recipe, the same in every attempt of this flow run."""
        return f"{Path(recipe).stem}-{self.flow_run[:8]}"


def begin_attempt(max_attempts: int) -> Attempt:
    """Makes this process the only attempt of its flow run.

    Raises TrainingError after `max_attempts`, so that Prefect does not restart the flow run again.
    """
    home = prepare_home(verbose=True)
    start_guardian()
    sys.path.append(os.getcwd())  # for the user's functions
    number, name = int(flow_run.run_count or 1), str(flow_run.id)
    if number > max_attempts:
        raise TrainingError(
            f"attempt {number} (max_attempts={max_attempts}): the flow run crashed repeatedly. Committed steps are "
            "kept; see the logs of the attempts, then start a flow run with the same run name to resume."
        )
    mine = Store(str(home)).child("attempts")
    if mine.exists(f"{name}.json"):
        stop_processes([Process(**mine.read_json(f"{name}.json")["process"])])
    mine.write_json(f"{name}.json", {"process": asdict(Process.of(os.getpid()))})
    return Attempt(home, name, number)


def find_conflicting_training() -> str | None:
    """A message if another training runs in the same work pool, else None.

    Of two that start together the one with the earlier state timestamp continues. The server sets the timestamp before
    it stores the state, so the check runs twice.
    """
    for wait in (0.0, RECHECK_DELAY_S):
        time.sleep(wait)
        with get_client(sync_client=True) as client:
            running = client.read_flow_runs(
                flow_filter=FlowFilter(name=FlowFilterName(any_=TRAININGS)),
                flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=StateFilter(any_=[StateType.RUNNING]))),
            )
        own = next((run for run in running if str(run.id) == flow_run.id), None)
        for run in running:
            if own and run.id != own.id and run.work_pool_name == own.work_pool_name and _since(run) < _since(own):
                return (
                    f"refused: flow run {run.name} ({run.id}) is training in work pool {own.work_pool_name}; only one "
                    "training may run at a time, so start this one again after it has ended"
                )
    return None


def cancellation_requested() -> bool:
    """Whether this flow run is being cancelled; False if the server does not answer."""
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(str(flow_run.id))).state
    except (PrefectException, httpx.HTTPError):
        return False
    return state is not None and state.type == StateType.CANCELLING


def retry_transient(call: Callable[[], Answer]) -> Answer:
    """Result of the call, retried on TransientError after each of `RETRY_DELAYS_S`; then raises the error."""
    for wait in RETRY_DELAYS_S:
        try:
            return call()
        except TransientError:
            end = time.monotonic() + wait
            while time.monotonic() < end:
                progress()
                time.sleep(1.0)
    return call()


def _since(run: FlowRun) -> tuple[Any, str]:
    assert run.state is not None
    return run.state.timestamp, str(run.id)
