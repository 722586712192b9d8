"""Closes MLflow runs that are marked as running although their process is gone, with the state in their own store."""

import socket
from typing import Any

from rl_core.storage.status import read_status
from rl_core.storage.store import Store
from tasks.runs.open_run import NAME
from tasks.tracking.tracker import RUN_TAG, Tracker, mlflow_client, mlflow_errors

STORE_TAG = "rollforward.store"
"""Tag of an MLflow run with the location of its run."""
MLFLOW_STATES: Any = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


def store_url(store: Store) -> str:
    """Location of a run, unique over all machines: a local folder is prefixed with the host name."""
    return f"{socket.gethostname()}:{store.url}" if store.is_local else store.url


def close_stale_runs(tracker: Tracker, root: Store) -> list[str]:
    """Closes runs of the tracker's experiment that are below `root` and whose process is gone; returns their names.

    A process that was killed, or that ended while MLflow was down, could not close its run. Raises TransientError on
    an outage.
    """
    closed = []
    client = mlflow_client(tracker.uri)
    with mlflow_errors(tracker.uri):
        own = client.get_run(tracker.run_id)
        found = client.search_runs([own.info.experiment_id], "attributes.status = 'RUNNING'")
        for run in found:
            name = run.data.tags.get(RUN_TAG, "")
            if run.info.run_id == own.info.run_id or not NAME.fullmatch(name):
                continue
            store = root.child(name)
            status = read_status(store) if run.data.tags.get(STORE_TAG) == store_url(store) else None
            if status and status.state_now != "running":
                state, end_ms = MLFLOW_STATES[status.state_now], int(status.beat * 1000)
                client.set_terminated(run.info.run_id, state, end_ms)
                closed.append(name)
    return closed
