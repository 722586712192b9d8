"""Creates work pool, deployments and automations on the Prefect server of PREFECT_API_URL from two YAML files."""

import os
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar
from uuid import UUID

import httpx
import yaml
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.deployments.runner import DeploymentApplyError, EntrypointType, RunnerDeployment
from prefect.events import AutomationCore, DeploymentEventTrigger
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.flows import Flow, load_flow_from_entrypoint
from prefect.runner.storage import LocalStorage
from prefect.schedules import Schedule
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from flows.server.pool import apply_pool
from rl_core.errors import InputError, TransientError

Form = TypeVar("Form")

FOLDER = Path(__file__).parents[2] / "deployments"
DEPLOYMENTS, AUTOMATIONS = FOLDER / "prefect.yaml", FOLDER / "automations.yaml"
SETTLE_S = 2.0
"""Pause before an automation is changed. Prefect's server on SQLite (3.7.7) hangs for good if an automation changes
while it processes an event, so automations are changed only if they differ, and after a pause."""


class Part(BaseModel):
    """A section of the file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")


class ScheduleSpec(Part):
    """A schedule of a deployment; the slug identifies it when the file is applied again."""

    slug: str
    cron: str | None = None
    interval: timedelta | None = None
    anchor_date: datetime | None = None
    timezone: str | None = None
    active: bool = True
    parameters: dict[str, Any] = {}


class PoolSpec(Part):
    """The work pool of a deployment."""

    name: str


class DeploymentSpec(Part):
    """A deployment in the format of Prefect's prefect.yaml; the entrypoint is the module path of a flow."""

    name: str
    entrypoint: str
    description: str | None = None
    work_pool: PoolSpec
    parameters: dict[str, Any] = {}
    schedules: list[ScheduleSpec] = []
    triggers: list[DeploymentEventTrigger] = []


class DeploymentFile(Part):
    """The whole file; `definitions` contains YAML anchors only."""

    name: Literal["rollforward"]
    definitions: Any = None
    deployments: list[DeploymentSpec]


def deploy(file: Path | None) -> list[tuple[str, str]]:
    """Creates or updates the deployments of the file and all automations; returns the result as table rows.

    Active schedules stay active. Raises InputError for an invalid file and for requests that the server rejects, and
    TransientError if the server does not answer.
    """
    specs = read_deployments(file or DEPLOYMENTS)
    automations = read_automations()
    rows = []
    try:
        with get_client(sync_client=True) as client:
            for pool in dict.fromkeys(spec.work_pool.name for spec in specs):
                rows.append((f"work pool {pool}", apply_pool(client, pool)))
            for spec in specs:
                name, outcome, triggers = _apply_deployment(client, spec)
                rows.append((f"deployment {name}", outcome))
                automations += triggers
            rows += [(f"automation {one.name}", _apply_automation(client, one)) for one in automations]
    except httpx.TransportError as error:
        raise TransientError("the Prefect server does not answer: restart it, then deploy again") from error
    except (PrefectException, DeploymentApplyError, httpx.HTTPStatusError, ValueError) as error:
        cause = error if isinstance(error, httpx.HTTPStatusError) else error.__cause__
        broken = isinstance(cause, httpx.HTTPStatusError) and cause.response.status_code >= 500
        if broken or isinstance(cause, httpx.TransportError):
            raise TransientError(f"the Prefect server failed: {error}") from error
        raise InputError(
            expected="deployments that the server accepts",
            seen=str(error),
            where=str(file or DEPLOYMENTS),
            fix="correct the entry in the message",
        ) from error
    return rows


def read_deployments(file: Path) -> list[DeploymentSpec]:
    """The deployments of the file; raises InputError if its format is invalid."""
    return _read(file, TypeAdapter(DeploymentFile)).deployments


def read_automations() -> list[AutomationCore]:
    """The automations that restart dead flow runs."""
    return _read(AUTOMATIONS, TypeAdapter(list[AutomationCore]))


def _read(file: Path, form: TypeAdapter[Form]) -> Form:
    try:
        return form.validate_python(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError) as error:
        raise InputError(
            expected="a YAML file", seen=str(error), where=str(file), fix="correct it, or choose another file"
        ) from error
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise InputError(
            expected="the format of a deployments file",
            seen="; ".join(problems),
            where=str(file),
            fix=f"compare it with {DEPLOYMENTS}",
        ) from error


def _apply_deployment(client: SyncPrefectClient, spec: DeploymentSpec) -> tuple[str, str, list[AutomationCore]]:
    """The deployment's name, `created` or `updated` with its schedules, and the automations for its triggers."""
    found = _load(spec)
    name = f"{found.name}/{spec.name}"
    try:
        existing = client.read_deployment_by_name(name)
    except ObjectNotFound:
        existing = None
    active = {schedule.slug: schedule.active for schedule in existing.schedules} if existing else {}
    schedules = [_schedule(schedule, active.get(schedule.slug, schedule.active)) for schedule in spec.schedules]
    deployment = RunnerDeployment.from_flow(
        found,
        spec.name,
        description=spec.description,
        work_pool_name=spec.work_pool.name,
        parameters=spec.parameters,
        schedules=schedules,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    # Relative recipes, rows and functions are resolved from the folder in which `rollforward deploy` ran.
    deployment.storage = LocalStorage(os.getcwd())
    number = deployment.apply()
    assert isinstance(number, UUID)
    on = [f"{schedule.slug} {'on' if schedule.active else 'off'}" for schedule in schedules]
    automations = [_started_by(trigger, number, spec.name) for trigger in spec.triggers]
    return name, ", ".join(["updated" if existing else "created", *on]), automations


def _started_by(trigger: DeploymentEventTrigger, deployment: UUID, name: str) -> AutomationCore:
    """An automation without an owner: those owned by a deployment are deleted and recreated on every update."""
    trigger.set_deployment_id(deployment)
    own = {"owner_resource": None, "name": f"rollforward {name} by {' or '.join(sorted(trigger.expect))}"}
    return trigger.as_automation().model_copy(update=own)


def _load(spec: DeploymentSpec) -> Flow[..., Any]:
    try:
        return load_flow_from_entrypoint(spec.entrypoint, use_placeholder_flow=False)
    except Exception as error:
        raise InputError(
            expected="the module path of a flow",
            seen=str(error),
            where=f"entrypoint {spec.entrypoint} of {spec.name}",
            fix="use a path such as flows.post_train.post_train",
        ) from error


def _schedule(spec: ScheduleSpec, active: bool) -> Schedule:
    return Schedule(**{**spec.model_dump(exclude_none=True), "active": active})


def _apply_automation(client: SyncPrefectClient, wanted: AutomationCore) -> str:
    existing = client.read_automations_by_name(wanted.name)
    if existing and AutomationCore.model_validate(existing[0].model_dump()) == wanted:
        return "unchanged"
    time.sleep(SETTLE_S)
    if existing:
        client.update_automation(existing[0].id, wanted)
        return "updated"
    client.create_automation(wanted)
    return "created"
