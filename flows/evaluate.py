"""Flow: scores a registered version on held-out rows, without training."""

import json
from typing import Annotated, Any

from prefect import flow
from pydantic import Field

from flows.attempts import begin_attempt, retry_transient
from flows.first_checks import watch_for_hang
from flows.parameters import compose_parameters
from rl_core.config.compose import extend
from tasks.registry.registry import CHAMPION, Registry
from tasks.tracking.tracker import default_tracking_uri


@flow(name="evaluate", flow_run_name="{recipe}: {version}", persist_result=False)
def evaluate(
    recipe: Annotated[str, Field(min_length=1)],
    overrides: list[str] | None = None,
    version: int | str = CHAMPION,
    max_attempts: Annotated[int, Field(ge=1)] = 5,
) -> dict[str, Any]:
    """Scores a version or alias of the recipe's model on the recipe's held-out rows.

    Args:
        recipe: name or path of a recipe. overrides: settings as `a.b=value`. version: number or alias.
        max_attempts: maximum number of starts of the flow run before it fails.
    """
    attempt = begin_attempt(max_attempts)
    given = compose_parameters(recipe, overrides or [])
    config = given.config
    registry = Registry(config.tracking.uri or default_tracking_uri(attempt.home), config.registry.model_name)
    number = attempt.decide_once(config, lambda: {"version": registry.get(str(version)).version})["version"]
    folder = retry_transient(lambda: registry.local_folder(number, attempt.home / "cache"))
    # Ray and torch are imported here, after their environment was set.
    from flows.preflight import preflight
    from tasks.evaluate import evaluate as score
    from tasks.prepare_data import prepare_data
    from tasks.runs.open_run import find_run, open_run
    from tasks.session.session import open_session

    composed = extend(given, [f"model.path={json.dumps(str(folder))}", "warm_start.steps=0"])
    with watch_for_hang(composed.config):
        preflight(composed, attempt.home, resuming=True)
        name = f"evaluate-{attempt.run_name(recipe)}"
        retry_transient(lambda: find_run(composed, attempt.home, name))
        run = open_run(composed, attempt.home, name)
    with open_session(run, verbose=True, keep_data=attempt.number > 1):
        data = prepare_data()
        return {"version": number, "run": run.name, "data_hash": data["data_hash"], **score(0)}
