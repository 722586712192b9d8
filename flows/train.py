"""`post_train` as a worker runs it: checked, started once at a time, continued after a crash."""

import time
from typing import Annotated, Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled
from pydantic import Field

from flows.attempts import Attempt, asked_to_cancel, begin_attempt, other_training, retry_transient
from flows.parameters import GateMode, Hours, gate_setting
from rl_core.config.compose import Composed, compose


@flow(name="post-train", flow_run_name="{recipe}", persist_result=False)
def train(
    recipe: Annotated[str, Field(min_length=1)],
    overrides: list[str] | None = None,
    run_name: str | None = None,
    gate_mode: GateMode | None = None,
    max_hours: Hours | None = None,
    max_attempts: Annotated[int, Field(ge=1)] = 5,
) -> dict[str, Any] | State[Any]:
    """Runs all stages of a recipe; the run of this name is continued when it exists.

    Args:
        recipe: name or path of a recipe. overrides: settings as `a.b=value`. run_name: run to begin or continue.
        gate_mode: how the gate decides; what the recipe says when it is not given.
        max_hours: no further segment of steps begins after so many hours; what is trained by then is evaluated.
        max_attempts: times that the flow run may be started before it counts as failed.
    """
    attempt = begin_attempt(max_attempts)
    if refusal := other_training():
        return Cancelled(message=refusal)
    composed = compose(recipe, [*(overrides or []), *gate_setting(gate_mode)])
    plan = attempt.once(composed.config, lambda: {"stop_at": stop_time(max_hours)})
    return run_stages(attempt, composed, run_name, plan["stop_at"])


def run_stages(
    attempt: Attempt, composed: Composed, run_name: str | None, stop_at: float | None
) -> dict[str, Any] | State[Any]:
    """The summary of `post_train`, whose stages become task runs of the calling flow run; the state of a flow run that
    was cancelled."""
    # Ray and torch are imported here, when their environment is set.
    from flows.post_train import post_train
    from flows.preflight import preflight, watched
    from tasks.runs.run import find_run, open_run

    name = run_name or attempt.run_name(composed.recipe)
    with watched(composed.config):
        preflight(composed, attempt.home, resuming=True)
        retry_transient(lambda: find_run(composed, attempt.home, name))
        run = open_run(composed, attempt.home, name)
    try:
        # The rows that the first attempt committed stay, even if files have been added since.
        return post_train(run, verbose=True, stop_at=stop_at, keep_data=attempt.number > 1)
    except TerminationSignal:
        # While steps are made Prefect's own answer to a cancellation is replaced, and it takes SIGTERM for a crash,
        # after which the automations start the flow run again.
        if asked_to_cancel():
            return Cancelled(message=f"cancelled; what is committed stays, run_name={name} continues it")
        raise


def stop_time(max_hours: float | None) -> float | None:
    """The time, in seconds since 1970, at which a budget that begins now is used up."""
    return None if max_hours is None else time.time() + 3600 * max_hours
