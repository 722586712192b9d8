"""Resources left on this machine by dead runs: statuses, locks, processes, shared memory and uncommitted folders."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from rl_core.rollout.engine.shared_memory import ADAPTER_PREFIX, SHARED_MEMORY, VLLM_PATTERN
from rl_core.runtime.private import RAY_SECRET, SECRETS
from rl_core.storage.run_files import MANIFEST
from rl_core.storage.status import read_status
from rl_core.storage.store import Store
from tasks.runs.run import run_names

_RAY = ("raylet", "gcs_server", "ray::", "/ray/")
_YOUNG_S = 60.0
"""Age below which a file in shared memory is not reported, because a process may be about to open it."""

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: the item checked, the observation, and how to fix a problem."""

    level: Level
    what: str
    seen: str
    fix: str = ""


def leftovers(home: Path) -> list[Finding]:
    """Findings for everything left below a home folder and in shared memory; a single `ok` if nothing is left."""
    held = held_locks(home)
    found = [*_dead_runs(home), *_orphaned_locks(held), *_half_made(home, held)]
    if not held:
        found += _ray_processes(home)
    found += _shared_memory()
    return found or [Finding("ok", "leftovers", "none")]


def held_locks(home: Path) -> dict[str, int]:
    """Names of the locked runs, with the id of the process that took the lock, 0 if it is unknown."""
    held = {line.split()[5].rpartition(":")[2] for line in Path("/proc/locks").read_text().splitlines()
            if " FLOCK " in line and "->" not in line}  # fmt: skip
    locks = [path for path in (home / "locks").glob("*.lock") if str(path.stat().st_ino) in held]
    return {path.stem: _holder(path) for path in locks}


def _holder(lock: Path) -> int:
    words = lock.read_text(errors="replace").split()
    return int(words[1]) if len(words) > 1 and words[1].isdecimal() else 0


def _dead_runs(home: Path) -> Iterator[Finding]:
    root = Store(str(home / "runs"))
    for name in run_names(root):
        status = read_status(root.child(name))
        if status and status.state == "running" and not status.lives:
            fix = f"to resume from the last committed step: the same command with --run {name}"
            yield Finding(
                "warning", "run", f"{name} stopped in stage {status.stage} at step {status.step}: its process died", fix
            )


def _orphaned_locks(held: dict[str, int]) -> Iterator[Finding]:
    for name, pid in held.items():
        if pid and not psutil.pid_exists(pid):
            seen = f"run {name} is locked by a child of process {pid}, which is gone"
            yield Finding("problem", "lock", seen, f"kill the child: fuser -k ROLLFORWARD_HOME/locks/{name}.lock")


def _ray_processes(home: Path) -> Iterator[Finding]:
    token = str(home / SECRETS / RAY_SECRET)
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        command = " ".join(process.info["cmdline"] or [])
        if (process.info["environ"] or {}).get("RAY_AUTH_TOKEN_PATH") == token and any(p in command for p in _RAY):
            found.append(str(process.pid))
    if found:
        seen = f"{len(found)} Ray process{'es' if len(found) > 1 else ''} of a dead run"
        yield Finding("warning", "ray processes", seen, f"kill {' '.join(found)}")


def _shared_memory() -> Iterator[Finding]:
    candidates = [path for pattern in (VLLM_PATTERN, f"{ADAPTER_PREFIX}*") for path in SHARED_MEMORY.glob(pattern)]
    candidates = [path for path in candidates if _is_ours(path)]
    mapped = _mapped() if candidates else ""
    dead = [path for path in candidates if str(path) not in mapped]
    if dead:
        fix = f"rm -r {' '.join(map(str, dead))}"
        yield Finding("warning", "shared memory", f"{len(dead)} unused segments", fix)


def _is_ours(path: Path) -> bool:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return False
    return facts.st_uid == os.getuid() and time.time() - facts.st_mtime > _YOUNG_S


def _mapped() -> str:
    """The memory maps of all processes that this user may read."""
    maps = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            maps.append(path.read_text())
        except OSError:
            continue
    return "".join(maps)


def _half_made(home: Path, held: dict[str, int]) -> Iterator[Finding]:
    drafts = [] if held else list((home / "models").glob("*.draft"))
    steps = [path for path in (home / "runs").glob("*/checkpoints/step_*")
             if path.parts[-3] not in held and not (path / MANIFEST).exists()]  # fmt: skip
    for path in [*drafts, *steps]:
        yield Finding("warning", "uncommitted", str(path), "resume the run, which removes it, or: rm -r " + str(path))
