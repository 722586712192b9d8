"""Puts work pool, deployments and automations on the Prefect server of PREFECT_API_URL, as two YAML files say."""

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
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.deployments.runner import DeploymentApplyError, EntrypointType, RunnerDeployment
from prefect.events import AutomationCore, DeploymentEventTrigger
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectException
from prefect.flows import Flow, load_flow_from_entrypoint
from prefect.runner.storage import LocalStorage
from prefect.schedules import Schedule
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from rl_core.errors import InputError, TransientError

Form = TypeVar("Form")

FOLDER = Path(__file__).parents[2] / "deployments"
DEPLOYMENTS, AUTOMATIONS = FOLDER / "prefect.yaml", FOLDER / "automations.yaml"
SETTLE_S = 2.0
"""Prefect's server on SQLite hangs for good when an automation changes while it looks at an event (seen in 3.7.7). So
automations are only changed when they differ, and some seconds after anything else."""


class Part(BaseModel):
    """A part of the file; what is not known is refused, as it would be ignored."""

    model_config = ConfigDict(extra="forbid")


class ScheduleSpec(Part):
    """When a deployment runs; the slug tells schedules apart when they are applied again."""

    slug: str
    cron: str | None = None
    interval: timedelta | None = None
    anchor_date: datetime | None = None
    timezone: str | None = None
    active: bool = True
    parameters: dict[str, Any] = {}


class PoolSpec(Part):
    """Where a deployment runs, and with which variables of the worker's job."""

    name: str
    job_variables: dict[str, Any] = {}


class DeploymentSpec(Part):
    """A deployment in the form of Prefect's prefect.yaml; the entrypoint is a flow's place among the modules."""

    name: str
    entrypoint: str
    description: str | None = None
    work_pool: PoolSpec
    parameters: dict[str, Any] = {}
    schedules: list[ScheduleSpec] = []
    triggers: list[DeploymentEventTrigger] = []


class DeploymentFile(Part):
    """The whole file; `definitions` only holds what is repeated."""

    name: Literal["rollforward"]
    definitions: Any = None
    deployments: list[DeploymentSpec]


def deploy(file: Path | None) -> list[tuple[str, str]]:
    """Applies the deployments of the file and all automations; what is there is updated. Returns a table of it.

    A schedule keeps whether it is switched on. Raises InputError for a file that does not fit, and for what the server
    refuses, and TransientError when it does not answer.
    """
    specs = read_deployments(file or DEPLOYMENTS)
    automations = read_automations()
    rows = []
    try:
        with get_client(sync_client=True) as client:
            for pool in dict.fromkeys(spec.work_pool.name for spec in specs):
                rows.append((f"work pool {pool}", _apply_pool(client, pool)))
            for spec in specs:
                name, outcome, triggers = _apply_deployment(client, spec)
                rows.append((f"deployment {name}", outcome))
                automations += triggers
            rows += [(f"automation {one.name}", _apply_automation(client, one)) for one in automations]
    except httpx.TransportError as error:
        raise TransientError("the Prefect server does not answer: start it again, then deploy again") from error
    except (PrefectException, DeploymentApplyError, httpx.HTTPStatusError, ValueError) as error:
        cause = error if isinstance(error, httpx.HTTPStatusError) else error.__cause__
        broken = isinstance(cause, httpx.HTTPStatusError) and cause.response.status_code >= 500
        if broken or isinstance(cause, httpx.TransportError):
            raise TransientError(f"the Prefect server has failed: {error}") from error
        where, fix = str(file or DEPLOYMENTS), "change what the message speaks of"
        raise InputError("deployments that the server takes", str(error), where, fix) from error
    return rows


def read_deployments(file: Path) -> list[DeploymentSpec]:
    """The deployments of the file; InputError when it does not have their form."""
    return _read(file, TypeAdapter(DeploymentFile)).deployments


def read_automations() -> list[AutomationCore]:
    """What happens to flow runs that die."""
    return _read(AUTOMATIONS, TypeAdapter(list[AutomationCore]))


def _read(file: Path, form: TypeAdapter[Form]) -> Form:
    try:
        return form.validate_python(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError) as error:
        raise InputError("a YAML file", str(error), str(file), "give another file, or correct it") from error
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        fix = f"compare it with {DEPLOYMENTS}"
        raise InputError("the form of a deployments file", "; ".join(problems), str(file), fix) from error


def _apply_pool(client: SyncPrefectClient, name: str) -> str:
    try:
        client.create_work_pool(WorkPoolCreate(name=name, type="process"))
    except ObjectAlreadyExists:
        return "is there"
    return "made"


def _apply_deployment(client: SyncPrefectClient, spec: DeploymentSpec) -> tuple[str, str, list[AutomationCore]]:
    """The deployment's name, what was done, and the automations that start it by events."""
    found = _load(spec)
    name = f"{found.name}/{spec.name}"
    try:
        there = client.read_deployment_by_name(name)
    except ObjectNotFound:
        there = None
    switched = {schedule.slug: schedule.active for schedule in there.schedules} if there else {}
    schedules = [_schedule(schedule, switched.get(schedule.slug, schedule.active)) for schedule in spec.schedules]
    deployment = RunnerDeployment.from_flow(
        found,
        spec.name,
        description=spec.description,
        work_pool_name=spec.work_pool.name,
        job_variables=spec.work_pool.job_variables,
        parameters=spec.parameters,
        schedules=schedules,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    # Recipes, rows and functions are found from the folder in which `rollforward deploy` ran.
    deployment.storage = LocalStorage(os.getcwd())
    number = deployment.apply()
    assert isinstance(number, UUID)
    on = [f"{schedule.slug} {'on' if schedule.active else 'off'}" for schedule in schedules]
    automations = [_started_by(trigger, number, spec.name) for trigger in spec.triggers]
    return name, ", ".join(["updated" if there else "made", *on]), automations


def _started_by(trigger: DeploymentEventTrigger, deployment: UUID, name: str) -> AutomationCore:
    """An automation of its own: those that a deployment owns are deleted and made anew each time."""
    trigger.set_deployment_id(deployment)
    own = {"owner_resource": None, "name": f"rollforward {name} by {' or '.join(sorted(trigger.expect))}"}
    return trigger.as_automation().model_copy(update=own)


def _load(spec: DeploymentSpec) -> Flow[..., Any]:
    try:
        return load_flow_from_entrypoint(spec.entrypoint, use_placeholder_flow=False)
    except Exception as error:
        fix = "name a flow such as flows.train.train"
        raise InputError("a flow", str(error), f"entrypoint {spec.entrypoint} of {spec.name}", fix) from error


def _schedule(spec: ScheduleSpec, active: bool) -> Schedule:
    return Schedule(**{**spec.model_dump(exclude_none=True), "active": active})


def _apply_automation(client: SyncPrefectClient, wanted: AutomationCore) -> str:
    there = client.read_automations_by_name(wanted.name)
    if there and AutomationCore.model_validate(there[0].model_dump()) == wanted:
        return "is there"
    time.sleep(SETTLE_S)
    if there:
        client.update_automation(there[0].id, wanted)
        return "updated"
    client.create_automation(wanted)
    return "made"
