"""What a flow does first when a worker runs it: its environment, its place among other attempts and other runs.

Prefect starts the same flow run again after a crash. What an attempt decided stands for those after it, and a process
of an earlier attempt that still lives is ended: it may have lost its server only.
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

from flows.home import prepare_home
from flows.server.services import end
from rl_core.config.schema import RunConfig
from rl_core.errors import TrainingError, TransientError
from rl_core.runtime.guardian import start_guardian
from rl_core.runtime.process import Process
from rl_core.runtime.watchdog import progress
from rl_core.storage.store import Store
from tasks.runs.run import runs_root

Answer = TypeVar("Answer")

TRAININGS = ["post-train", "retrain"]
"""Flows of which one at a time runs in a work pool."""
ASK_AGAIN_S = 1.0
WAITS_S = (10.0, 30.0, 60.0, 120.0)
"""Waits for MLflow or storage outside of stages: a server that starts anew takes so long."""


@dataclass(frozen=True)
class Attempt:
    """This process's attempt at a flow run."""

    home: Path
    flow_run: str
    number: int
    """1 for the first attempt."""

    def once(self, config: RunConfig, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What the first attempt decided, as JSON; what storage and MLflow cannot say now is asked for again.

        It is kept beside the runs, where attempts on other machines find it.
        """
        from flows.preflight import watched  # with torch, when its environment is set

        store, file = runs_root(config.storage, self.home).child("attempts"), f"{self.flow_run}.json"

        def decided() -> dict[str, Any]:
            if not store.exists(file):
                store.write_json(file, decide())
            kept: dict[str, Any] = store.read_json(file)
            return kept

        with watched(config):
            return retry_transient(decided)

    def run_name(self, recipe: str) -> str:
        """A name for a run of the recipe that every attempt at this flow run finds again."""
        return f"{Path(recipe).stem}-{self.flow_run[:8]}"


def begin_attempt(max_attempts: int) -> Attempt:
    """Makes this process the only attempt at its flow run.

    Raises TrainingError beyond `max_attempts`, after which Prefect does not start the flow run again.
    """
    home = prepare_home(verbose=True)
    start_guardian()
    sys.path.append(os.getcwd())  # functions of the user's own
    number, name = int(flow_run.run_count or 1), str(flow_run.id)
    if number > max_attempts:
        raise TrainingError(
            f"attempt {number} of at most {max_attempts}: the run crashes again and again. What is committed stays; "
            "see the log of the attempts, then start a flow run with the same run name."
        )
    mine = Store(str(home)).child("attempts")
    if mine.exists(f"{name}.json"):
        end([Process(**mine.read_json(f"{name}.json")["process"])])
    mine.write_json(f"{name}.json", {"process": asdict(Process.of(os.getpid()))})
    return Attempt(home, name, number)


def other_training() -> str | None:
    """Why this training may not run now, in words: another one of the work pool does. None when it may.

    Of two that start together the one whose state the server stamped first goes on. The server stamps a state before it
    stores it, so it is asked twice.
    """
    for wait in (0.0, ASK_AGAIN_S):
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
                    f"refused: flow run {run.name} ({run.id}) trains in work pool {own.work_pool_name} and two "
                    "trainings never overlap; start again when it has ended"
                )
    return None


def asked_to_cancel() -> bool:
    """Whether somebody cancels this flow run; False when the server does not say."""
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(str(flow_run.id))).state
    except (PrefectException, httpx.HTTPError):
        return False
    return state is not None and state.type == StateType.CANCELLING


def retry_transient(ask: Callable[[], Answer]) -> Answer:
    """What storage or MLflow answers, asked again for some minutes; after that raises its TransientError."""
    for wait in WAITS_S:
        try:
            return ask()
        except TransientError:
            end = time.monotonic() + wait
            while time.monotonic() < end:
                progress()
                time.sleep(1.0)
    return ask()


def _since(run: FlowRun) -> tuple[Any, str]:
    assert run.state is not None
    return run.state.timestamp, str(run.id)
