"""Failed steps: their batch and error, kept until the step is committed.

`failed/step_000012.parquet` contains the step's rollouts with all inputs of its loss; the `.json` next to it, written
last, contains the error and the metrics so far.
"""

from typing import Any

from rl_core.data.protocol import DataProto, Metrics
from rl_core.errors import short_message
from rl_core.storage import run_files
from rl_core.storage.store import Store
from rl_core.trainer.rollout_file import write_rollouts


def keep_failure(store: Store, step: int, batch: DataProto, metrics: Metrics, error: Exception) -> None:
    """Stores a failed step; replaces an earlier failure of the same step."""
    write_rollouts(store, run_files.failed_rollouts(step), batch)
    store.write_json(run_files.failed_error(step), {"step": step, "error": short_message(error), "metrics": metrics})


def read_failure(store: Store, step: int) -> dict[str, Any] | None:
    """Error and metrics of a failed step; None if the step has no recorded failure."""
    try:
        failure: dict[str, Any] = store.read_json(run_files.failed_error(step))
    except FileNotFoundError:
        return None
    return failure


def failed_step(store: Store, committed: int) -> int | None:
    """The last recorded failed step after the committed one; None if there is none."""
    return max((step for step in _steps(store).values() if step > committed), default=None)


def forget_failures(store: Store, upto: int) -> None:
    """Deletes the recorded failures of steps up to `upto`, which have been committed since."""
    for name, step in _steps(store).items():
        if step <= upto:
            store.remove(f"{run_files.FAILED}/{name}")


def _steps(store: Store) -> dict[str, int]:
    """The step of each file in the folder."""
    names = store.listdir(run_files.FAILED)
    return {name: int(name.removeprefix("step_").partition(".")[0]) for name in names if name.startswith("step_")}
