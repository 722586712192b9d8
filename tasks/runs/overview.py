"""The runs that a home folder or storage keeps, and how far each has come, from what they write there."""

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
    """One run; `state` is `running`, `finished`, `stopped`, `failed` or `damaged`, times are seconds since 1970."""

    name: str
    url: str
    recipe: str = ""
    state: str = "damaged"
    step: int = 0
    steps: int = 0
    reward: float | None = None
    pid: int | None = None
    changed: float = 0.0


def present_status(store: Store) -> Status:
    """The status of a run as it is now: `step` is done when it is running, and committed when it is not."""
    run = store.read_json(run_files.RUN)
    try:
        steps, created = run["config"]["trainer"]["steps"], run["created"]
    except (KeyError, TypeError) as error:
        raise InputError("what a run is", f"no {error}", f"{store.url}/{run_files.RUN}", "restore the file") from error
    ended = "finished" if store.exists(run_files.REPORT) else "stopped"
    status = read_status(store) or Status(state=ended, steps=steps, beat=created)
    if status.state_now == "running":
        return status
    return status.model_copy(update={"state": status.state_now, "step": committed_step(store)})


def overview(store: Store, name: str) -> Overview:
    """A run in the table of all runs."""
    try:
        status, recipe = present_status(store), str(store.read_json(run_files.RUN)["recipe"])
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
    """All runs below the root, the one that changed last first."""
    found = [overview(root.child(name), name) for name in run_names(root)]
    return sorted(found, key=lambda each: each.changed, reverse=True)


def _reward(store: Store, step: int) -> float | None:
    try:
        return Ledger(store).read(step)["metrics"].get("reward/mean") if step else None
    except RollforwardError:
        return None


def row(run: Overview) -> tuple[str, ...]:
    """The run in the columns of `COLUMNS`."""
    state = f"running ({run.pid})" if run.pid else run.state
    reward = "" if run.reward is None else f"{run.reward:.3f}"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed)) if run.changed else ""
    return run.name, run.recipe, f"{run.step}/{run.steps}", reward, state, when


COLUMNS = ("run", "recipe", "step", "reward", "state", "changed")


def lines(status: Status, now: float) -> list[tuple[str, str]]:
    """A present status in names and values; `now` is in seconds since 1970."""
    running = status.state == "running"
    rows = [("state", f"running, process {status.pid} on {status.host}" if running else status.state)]
    if status.error:
        rows.append(("why", status.error))
    rows.append(("step", f"{status.step}/{status.steps}" + _bar(status)))
    if status.seconds_per_step:
        rows.append(("rate", f"{duration(status.seconds_per_step)} a step"))
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
    return [*rows, ("last sign", f"{_ago(status.beat, now)} ago")]


def _ago(since: float, now: float) -> str:
    return duration(max(now - since, 0.0)) if since else "0s"


def _bar(status: Status, width: int = 30) -> str:
    done = round(width * status.step / max(status.steps, 1))
    return f"  {'█' * done}{'░' * (width - done)}"
