"""Status and progress of the runs in a home folder or object store, read from their files."""

import time
from dataclasses import dataclass

from rl_core.console import duration
from rl_core.errors import InputError, RollforwardError
from rl_core.storage import run_files
from rl_core.storage.ledger import Ledger
from rl_core.storage.status import WAITS, Status, read_status
from rl_core.storage.store import Store
from tasks.runs.run import committed_step, run_names


@dataclass(frozen=True)
class Overview:
    """One row of the list of runs.

    `state` is `running`, `finished`, `stopped`, `failed` or `damaged`; `changed` is in seconds since 1970.
    """

    name: str
    url: str
    recipe: str = ""
    state: str = "damaged"
    step: int = 0
    steps: int = 0
    reward: float | None = None
    pid: int | None = None
    changed: float = 0.0


def current_status(store: Store) -> Status:
    """The current status of a run; `step` is the last completed one of a running run, else the last committed one.

    Raises InputError if `run.json` lacks a field.
    """
    run = store.read_json(run_files.RUN)
    try:
        steps, created = run["config"]["trainer"]["steps"], run["created"]
    except (KeyError, TypeError) as error:
        raise InputError(
            expected="name, config and start time of a run",
            seen=f"no {error}",
            where=f"{store.url}/{run_files.RUN}",
            fix="restore the file",
        ) from error
    ended = "finished" if store.exists(run_files.REPORT) else "stopped"
    status = read_status(store) or Status(state=ended, steps=steps, beat=created)
    if status.state_now == "running":
        return status
    return status.model_copy(update={"state": status.state_now, "step": committed_step(store)})


def overview(store: Store, name: str) -> Overview:
    """The row of one run; a run whose `run.json` cannot be used is `damaged`."""
    try:
        status, recipe = current_status(store), str(store.read_json(run_files.RUN)["recipe"])
    except (InputError, KeyError):
        return Overview(name, store.url)
    running = status.state == "running"
    return Overview(
        name,
        store.url,
        recipe,
        status.state,
        status.step,
        status.steps,
        status.reward if running else _reward(store, status.step),
        status.pid if running else None,
        status.beat,
    )


def overviews(root: Store) -> list[Overview]:
    """All runs below the root, the most recently changed first."""
    found = [overview(root.child(name), name) for name in run_names(root)]
    return sorted(found, key=lambda each: each.changed, reverse=True)


def _reward(store: Store, step: int) -> float | None:
    try:
        return Ledger(store).read(step)["metrics"].get("reward/mean") if step else None
    except RollforwardError:
        return None


def overview_row(run: Overview) -> tuple[str, ...]:
    """The cells of a run, in the order of `COLUMNS`."""
    state = f"running ({run.pid})" if run.pid else run.state
    reward = "" if run.reward is None else f"{run.reward:.3f}"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed)) if run.changed else ""
    return run.name, run.recipe, f"{run.step}/{run.steps}", reward, state, when


COLUMNS = ("run", "recipe", "step", "reward", "state", "changed")


def status_rows(status: Status, now: float) -> list[tuple[str, str]]:
    """Names and values of a status returned by `current_status`; `now` is in seconds since 1970."""
    running = status.state == "running"
    rows = [("state", f"running, process {status.pid} on {status.host}" if running else status.state)]
    if status.error:
        rows.append(("error", status.error))
    rows.append(("step", f"{status.step}/{status.steps}" + _bar(status)))
    if status.seconds_per_step:
        rows.append(("rate", f"{duration(status.seconds_per_step)} per step"))
    if status.reward is not None:
        rows.append(("reward", f"{status.reward:.3f}"))
    if not running:
        return [*rows, ("last stage", status.stage or "none"), ("changed", f"{_ago(status.beat, now)} ago")]
    if status.seconds_per_step:
        rows.append(("time left", duration(status.seconds_left)))
    rows.append(("stage", f"{status.stage or 'start'}, for {_ago(status.stage_since, now)}"))
    if status.phase:
        waits = WAITS.get(status.phase, status.phase)
        rows.append(("now", f"step {status.step + 1}, {status.phase}: {waits}, for {_ago(status.phase_since, now)}"))
    return [*rows, ("updated", f"{_ago(status.beat, now)} ago")]


def _ago(since: float, now: float) -> str:
    return duration(max(now - since, 0.0)) if since else "0s"


def _bar(status: Status, width: int = 30) -> str:
    done = round(width * status.step / max(status.steps, 1))
    return f"  {'█' * done}{'░' * (width - done)}"
