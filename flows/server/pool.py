"""Work pools whose flow runs are started by one fixed command."""

from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectNotFound

TEMPLATE: dict[str, Any] = {
    # Only what is named here is taken from a flow run's job variables, and nothing is: by default these could replace
    # the command, its environment and its working directory. Without a command the worker starts Prefect's engine.
    "job_configuration": {"stream_output": True},
    "variables": {"type": "object", "properties": {}, "additionalProperties": False},
}
"""Base job template of a pool of processes; the server refuses all job variables."""


def apply_pool(client: SyncPrefectClient, name: str) -> str:
    """Creates the pool with this template, or sets the template; returns what it did.

    A pool of another type than `process` is left as it is.
    """
    try:
        pool = client.read_work_pool(name)
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=TEMPLATE))
        return "created"
    if pool.type != "process" or pool.base_job_template == TEMPLATE:
        return "unchanged"
    client.update_work_pool(name, WorkPoolUpdate(base_job_template=TEMPLATE))
    return "updated"
