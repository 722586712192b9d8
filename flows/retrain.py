"""Retraining: trains on from the champion when there is something new to learn, and says so when there is not."""

import json
import time
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed
from pydantic import Field

from flows.attempts import begin_attempt, other_training, retry_transient
from flows.parameters import GateMode, Hours, gate_setting
from flows.train import run_stages, stop_time
from rl_core.config.compose import compose, extend
from rl_core.config.schema import RunConfig
from rl_core.data.identity import data_identity
from rl_core.errors import InputError
from rl_core.storage.store import Store
from tasks.prefect_server.events import emit
from tasks.registry.registry import CHAMPION, Registry
from tasks.runs.run import runs_root
from tasks.tracking.tracker import default_tracking_uri

AS_OF = "{as_of}"
"""What a path of data may hold: the date as of which the data is read, as in rows/{as_of}/*.parquet."""


@flow(name="retrain", flow_run_name="{recipe}", persist_result=False)
def retrain(
    recipe: Annotated[str, Field(min_length=1)],
    overrides: list[str] | None = None,
    start_from: Literal["champion", "base"] = "champion",
    trigger: str | None = None,
    as_of: date | None = None,
    max_steps: Annotated[int, Field(ge=1)] | None = None,
    max_hours: Hours | None = None,
    gate_mode: GateMode | None = None,
    max_attempts: Annotated[int, Field(ge=1)] = 5,
) -> dict[str, Any] | State[Any]:
    """Trains and lets the gate decide when the data is other than that of the last retraining of this model.

    Args:
        recipe: name or path of a recipe. overrides: settings as `a.b=value`.
        start_from: the model's champion (the recipe's model while there is none), or the recipe's model.
        trigger: why to train although the data is the same.
        as_of: date that takes the place of `{as_of}` in paths of the data; the day that the run is scheduled for when
            it is not given.
        max_steps: trains at most so many steps. max_hours: no further segment of steps begins after so many hours.
        gate_mode: how the gate decides; what the recipe says when it is not given.
        max_attempts: times that the flow run may be started before it counts as failed.
    """
    attempt = begin_attempt(max_attempts)
    if refusal := other_training():
        return Cancelled(message=refusal)
    given = compose(recipe, [*(overrides or []), *gate_setting(gate_mode)])
    composed = extend(given, limits(given.config, as_of, max_steps))
    config = composed.config
    plan = attempt.once(
        config,
        lambda: {**plan_retraining(config, attempt.home, start_from, trigger), "stop_at": stop_time(max_hours)},
    )
    if not plan["reason"]:
        return _nothing_to_do(config, attempt.home)
    if plan["version"]:
        folder = Path(plan["folder"])
        if not folder.is_dir():  # an attempt on another machine has not asked MLflow for it yet
            retry_transient(lambda: version_folder(config, attempt.home, plan["version"]))
        # The champion has had its warm start.
        composed = extend(composed, [f"model.path={json.dumps(str(folder))}", "warm_start.steps=0"])
    result = run_stages(attempt, composed, None, plan["stop_at"])
    if isinstance(result, State):
        return result
    found = {"data": plan["data"], "run": result["run"], "trained": time.time(), "reason": plan["reason"]}
    store, file = _record(config, attempt.home)
    retry_transient(lambda: store.write_json(file, found))  # or the same rows are trained on again
    return {**result, "reason": plan["reason"]}


def limits(config: RunConfig, as_of: date | None, max_steps: int | None) -> list[str]:
    """Overrides that put the date into the paths of the data that hold `{as_of}` and limit the number of steps.

    Raises InputError for a date when no path holds `{as_of}`.
    """
    data = config.data.model_dump(mode="json", include={"path", "val_path", "mixture"})
    texts = {name: json.dumps(value) for name, value in data.items() if AS_OF in json.dumps(value)}
    if as_of and not texts:
        seen = ", ".join(config.data.paths) or f"rows that are made by {config.data.source}"
        raise InputError(f"a path of the data with {AS_OF}", seen, f"as_of={as_of}", f"write {AS_OF} into the path")
    day = (as_of or flow_run.scheduled_start_time.date()).isoformat() if texts else ""
    overrides = [f"data.{name}={text.replace(AS_OF, day)}" for name, text in texts.items()]
    return overrides if max_steps is None else [*overrides, f"trainer.steps={min(max_steps, config.trainer.steps)}"]


def plan_retraining(
    config: RunConfig, home: Path, start_from: Literal["champion", "base"], trigger: str | None
) -> dict[str, Any]:
    """The version to train on from and its folder (None for the recipe's model), the identity of the data, and the
    reason to train: None when there is none."""
    identity = data_identity(config.data, config.trainer.seed)
    store, file = _record(config, home)
    last = store.read_json(file) if store.exists(file) else {}
    reason = f"trigger: {trigger}" if trigger else None
    if last.get("data") != identity:
        reason = reason or ("the data has changed" if last else "the first retraining of this model")
    train_on = reason and start_from == "champion"
    version = _registry(config, home).aliases().get(CHAMPION) if train_on else None
    folder = version and str(version_folder(config, home, version))
    return {"version": version, "folder": folder, "data": identity, "reason": reason}


def version_folder(config: RunConfig, home: Path, version: str) -> Path:
    """The files of a version of the model on this machine."""
    return _registry(config, home).local_folder(version, home / "cache")


def _registry(config: RunConfig, home: Path) -> Registry:
    return Registry(config.tracking.uri or default_tracking_uri(home), config.registry.model_name)


def _record(config: RunConfig, home: Path) -> tuple[Store, str]:
    """Where it is kept what a model was last retrained on."""
    root = runs_root(config.storage, home)
    return root.child("retrain"), f"{config.registry.model_name}.json"


def _nothing_to_do(config: RunConfig, home: Path) -> State[Any]:
    store, file = _record(config, home)
    last = {**store.read_json(file), "checked": time.time()}
    store.write_json(file, last)
    model = config.registry.model_name
    words = f"nothing to do: {model} was trained on this data by run {last['run']}"
    create_markdown_artifact(words, key="retrain", description="What the retraining found")
    emit("rollforward.nothing_to_do", model, {"run": last["run"], "data": last["data"]})
    return Completed(message=words)
