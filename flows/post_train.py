"""Flow: `post_train` in a worker, with preflight checks, one training at a time, resumed after a crash."""

import time
from typing import Annotated, Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled
from pydantic import Field

from flows.attempts import Attempt, begin_attempt, cancellation_requested, find_conflicting_training, retry_transient
from flows.first_checks import watch_for_hang
from flows.parameters import GateMode, Hours, compose_parameters, gate_setting
from rl_core.config.compose import Composed


@flow(name="post-train", flow_run_name="{recipe}", persist_result=False)
def post_train(
    recipe: Annotated[str, Field(min_length=1)],
    overrides: list[str] | None = None,
    run_name: str | None = None,
    gate_mode: GateMode | None = None,
    max_hours: Hours | None = None,
    max_attempts: Annotated[int, Field(ge=1)] = 5,
) -> dict[str, Any] | State[Any]:
    """Runs all stages of a recipe; an existing run of this name is resumed.

    Args:
        recipe: name or path of a recipe. overrides: settings as `a.b=value`. run_name: run to start or resume.
        gate_mode: mode of the gate, by default the recipe's.
        max_hours: time after which no further segment of steps starts; the steps trained so far are evaluated.
        max_attempts: maximum number of starts of the flow run before it fails.
    """
    attempt = begin_attempt(max_attempts)
    if refusal := find_conflicting_training():
        return Cancelled(message=refusal)
    composed = compose_parameters(recipe, [*(overrides or []), *gate_setting(gate_mode)])
    plan = attempt.decide_once(composed.config, lambda: {"stop_at": stop_time(max_hours)})
    return run_attempt(attempt, composed, run_name, plan["stop_at"])


def run_attempt(
    attempt: Attempt, composed: Composed, run_name: str | None, stop_at: float | None
) -> dict[str, Any] | State[Any]:
    """Runs `post_train`, with its stages as task runs of the calling flow run; returns its summary, or the state
    Cancelled."""
    # Ray and torch are imported here, after their environment was set.
    from flows.pipeline import run_stages
    from flows.preflight import preflight
    from tasks.runs.open_run import find_run, open_run
    from tasks.session.workers import start_ray

    name = run_name or attempt.run_name(composed.recipe)
    with watch_for_hang(composed.config):
        preflight(composed, attempt.home, resuming=True)
        _, store = retry_transient(lambda: find_run(composed, attempt.home, name))
        ray = retry_transient(lambda: start_ray(composed.config, attempt.home, store))
        run = open_run(composed, attempt.home, name)
    try:
        # Later attempts use the rows committed by the first one, even if files were added since.
        return run_stages(run, verbose=True, stop_at=stop_at, keep_data=attempt.number > 1, local_ray=ray)
    except TerminationSignal:
        # During training steps Prefect's signal handler is replaced, so Prefect would take the SIGTERM of a
        # cancellation for a crash, and the automations would restart the flow run.
        if cancellation_requested():
            return Cancelled(message=f"cancelled; to resume from the last committed step: run_name={name}")
        raise


def stop_time(max_hours: float | None) -> float | None:
    """The end of a time budget that starts now, in seconds since 1970."""
    return None if max_hours is None else time.time() + 3600 * max_hours
