"""Finds the run that a command means, decides whether it starts or resumes, and takes its lease.

The step from which it resumes is chosen by trainer/checkpoints.py.
"""

import fcntl
import os
import re
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from rl_core.config.compose import Composed, config_hash, diff, from_dict, layout_diff
from rl_core.config.schema import RunConfig
from rl_core.console import Console
from rl_core.errors import InputError
from rl_core.storage import run_files
from rl_core.storage.lease import Lease
from rl_core.storage.store import Store
from tasks.runs.run import Run, code_version, committed_step, run_names, runs_root

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_KILLED_START = re.compile(rf"{run_files.LEASES}|\.probe-[0-9a-f]{{32}}|\.[0-9a-f]{{32}}\.tmp")
"""What a start that was killed leaves in the folder of its run before there is a `run.json`."""


def find_run(
    composed: Composed, home: Path, name: str | None = None, resume: bool = False, new: bool = False
) -> tuple[str, Store]:
    """Name and store of the run to start or resume; reads only.

    Without `name` a run is named after recipe and config, so the same command finds it again; `new` takes the next
    free name instead. Raises InputError if the run exists and neither `resume` nor `name` is given, if its config
    differs, if there is nothing to resume, or if the folder of a new run holds other files.
    """
    root = runs_root(composed.config.storage, home)
    wanted = name or f"{Path(composed.recipe).stem}-{config_hash(composed.config)[:8]}"
    if not NAME.fullmatch(wanted):
        raise InputError(
            expected="a run name of letters, digits, '.', '_' and '-'",
            seen=repr(wanted),
            where="--run",
            fix="choose another name",
        )
    if new:
        wanted = _free_name(root, wanted)
    store = root.child(wanted)
    started = has_started(store)
    if started and not (resume or name):
        raise InputError(
            expected="a run that does not exist yet",
            seen=f"run {wanted} exists",
            where=store.url,
            fix="add --resume to continue or show it, or --new to start another with the same config",
        )
    if resume and not store.exists(run_files.RUN):
        raise InputError(
            expected="a run to resume",
            seen=f"no run {wanted}",
            where=root.url,
            fix=f"omit --resume to start it, or use --run with one of: {_names(root)}",
        )
    if started:
        _check_same_config(store, composed, wanted)
    elif not store.exists(run_files.RUN):
        _check_unused(store)
    return wanted, store


def open_run(composed: Composed, home: Path, name: str | None = None, resume: bool = False, new: bool = False) -> Run:
    """Takes the lease of the run found by `find_run`, and writes `run.json` of a new one.

    Raises InputError as `find_run` does, and if another process works on the run.
    """
    wanted, store = find_run(composed, home, name, resume, new)
    with ExitStack() as failing:
        lock = failing.enter_context(_lock(home, wanted))
        if not store.exists(run_files.RUN):
            store.check_writable()
        lease = Lease(store, wanted, Console().note)
        failing.callback(lease.end)
        fresh = not store.exists(run_files.RUN)
        is_new = not has_started(store)
        if not is_new:
            _check_same_config(store, composed, wanted)  # the previous holder may have started the run meanwhile
        changed = {} if is_new else layout_diff(_first_config(store), composed.config)
        composed = _with_engine(composed, store)
        run = Run(wanted, composed, home, store.guarded(lease.check, lease.number), lock, lease, changed, fresh)
        if is_new:
            run.store.write_json(run_files.RUN, _facts(run))
        failing.pop_all()
    return run


def has_started(store: Store) -> bool:
    """Whether the run has committed rows or steps; until then its config may still change."""
    return store.exists(run_files.RUN) and (
        store.exists(f"{run_files.DATA}/{run_files.MANIFEST}") or committed_step(store) > 0
    )


def _facts(run: Run) -> dict[str, Any]:
    """Content of `run.json`."""
    composed = run.composed
    return {
        "name": run.name,
        "recipe": composed.recipe,
        "config": composed.config.model_dump(mode="json"),
        "config_hash": config_hash(composed.config),
        "code_version": code_version(),
        "origins": {key: origin for key, origin in composed.origins.items() if origin != "default"},
        "created": time.time(),
    }


def _first_config(store: Store) -> RunConfig:
    """The config of the run's first start."""
    config = from_dict(store.read_json(run_files.RUN)["config"])
    return _served_by(config, "vllm") if config.rollout.engine == "auto" else config  # older than the setting


def _with_engine(composed: Composed, store: Store) -> Composed:
    """The config with the engine that `rollout.engine=auto` means: the run's own, or this machine's for a new run."""
    from rl_core.cluster.resources import resolve_device  # imports Ray

    config = composed.config
    if config.rollout.engine != "auto":
        return composed
    if has_started(store):
        engine = _first_config(store).rollout.engine
    else:
        engine = config.rollout.engine_on(resolve_device(config.trainer))
    return replace(composed, config=_served_by(config, engine))


def _served_by(config: RunConfig, engine: str) -> RunConfig:
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})


def _check_same_config(store: Store, composed: Composed, name: str) -> None:
    changed = diff(_first_config(store), _with_engine(composed, store).config)
    if changed:
        raise InputError(
            expected=f"the config with which run {name} was started",
            seen="; ".join(f"{key} was {before}, now {now}" for key, (before, now) in changed.items()),
            where=store.url,
            fix="give the same overrides again, or another --run NAME",
        )


def _check_unused(store: Store) -> None:
    """Raises InputError if the folder of a new run holds files, which could be the user's."""
    if found := [name for name in store.listdir() if not _KILLED_START.fullmatch(name)]:
        raise InputError(
            expected=f"an empty folder for a new run, or one with the {run_files.RUN} of a run",
            seen=", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else ""),
            where=store.url,
            fix="choose another --run NAME, or another storage.root",
        )


def _free_name(root: Store, base: str) -> str:
    name, number = base, 1
    while root.exists(f"{name}/{run_files.RUN}"):
        number += 1
        name = f"{base}-{number}"
    return name


def _names(root: Store) -> str:
    return ", ".join(run_names(root)) or "none found"


def _lock(home: Path, name: str) -> IO[str]:
    """An exclusive lock, released by the kernel when this process ends for any reason."""
    path = home / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        raise InputError(
            expected="a run that no other process is working on",
            seen=f"locked by {holder}",
            where=f"run {name}",
            fix="wait for it to end, or start another with --run NAME",
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
    file.flush()
    return file
