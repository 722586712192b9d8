"""MLflow's runs that look alive though their process is gone: each is closed as its own store says that it ended."""

import socket
from typing import Any

from rl_core.storage.status import read_status
from rl_core.storage.store import Store
from tasks.runs.run import NAME
from tasks.tracking.tracker import RUN_TAG, Tracker, mlflow_client, mlflow_errors

STORE_TAG = "rollforward.store"
"""Tag of an MLflow run that says where its run is kept."""
MLFLOW_STATES: Any = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


def store_url(store: Store) -> str:
    """Where a run is kept, in words that no other machine uses for another place."""
    return f"{socket.gethostname()}:{store.url}" if store.is_local else store.url


def end_orphans(tracker: Tracker, root: Store) -> list[str]:
    """Closes the tracker's experiment's runs whose processes are gone, and that are kept below `root`; their names.

    A process that was killed, or that ended while MLflow was down, could not close its run. Raises TransientError on
    an outage.
    """
    ended = []
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
                ended.append(name)
    return ended
