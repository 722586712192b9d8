"""Steps that failed: what they trained on and how they ended, kept until they are committed.

`failed/step_000012.parquet` has the step's rollouts with all that its loss comes from, and the `.json` beside it, which
is written last, the error and the metrics so far.
"""

from typing import Any

from rl_core.data.protocol import DataProto, Metrics
from rl_core.errors import short_message
from rl_core.storage import run_files
from rl_core.storage.store import Store
from rl_core.trainer.rollout_file import rollout_parquet


def keep_failure(store: Store, step: int, batch: DataProto, metrics: Metrics, error: Exception) -> None:
    """Writes down a step that failed, in the place of an earlier failure of it."""
    store.write_bytes(run_files.failed_rollouts(step), rollout_parquet(batch))
    store.write_json(run_files.failed_error(step), {"step": step, "error": short_message(error), "metrics": metrics})


def read_failure(store: Store, step: int) -> dict[str, Any] | None:
    """Error and metrics of a step that failed; None when there is no such failure."""
    try:
        failure: dict[str, Any] = store.read_json(run_files.failed_error(step))
    except FileNotFoundError:
        return None
    return failure


def failed_step(store: Store, committed: int) -> int | None:
    """The last step behind the committed one that is kept as failed."""
    return max((step for step in _steps(store).values() if step > committed), default=None)


def forget_failures(store: Store, upto: int) -> None:
    """Removes what is kept of steps that have been committed since."""
    for name, step in _steps(store).items():
        if step <= upto:
            store.remove(f"{run_files.FAILED}/{name}")


def _steps(store: Store) -> dict[str, int]:
    """The step of each file."""
    names = store.listdir(run_files.FAILED)
    return {name: int(name.removeprefix("step_").partition(".")[0]) for name in names if name.startswith("step_")}
