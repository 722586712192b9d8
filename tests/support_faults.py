"""Points that a run passes, and deaths at exactly these points: a plan of kills, and a log of what was passed.

A run under test is the real command, started by tests/faults/command.py, which calls `passing` at each point. Its
faults folder holds the plan (a file a kill, in order), the log and the numbers of processes.
"""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

FAULTS = "ROLLFORWARD_FAULTS"
"""Variable with the faults folder, in the environment of all processes of a run under test."""
END = ("evaluation", "registration", "alias move")
BOUNDARIES = (
    "rollout", "score", "advantage", "critic update", "actor update", "weight push", "checkpoint shards", "manifest",
    "ledger record", "metric flush", *END,
)  # fmt: skip
WHEN = ("before", "after")
FLOW, WORKER, ENGINE, RAYLET, REWARD = "flow process", "training worker", "rollout engine", "raylet", "reward process"
VICTIMS = (FLOW, WORKER, ENGINE, RAYLET, REWARD)
GONE_S = 60.0
UNNOTICED = "unnoticed"
"""File that says that Ray does not know yet of its raylet's death: workers go on for some seconds."""


@dataclass(frozen=True)
class Kill:
    """The victim dies when the run passes the boundary for the first time at this step or later."""

    victim: str
    boundary: str
    when: str
    step: int


def write_plan(folder: Path, kills: Sequence[Kill]) -> None:
    """The kills, which happen in this order."""
    plan = folder / "plan"
    plan.mkdir(parents=True, exist_ok=True)
    for number, kill in enumerate(kills):
        (plan / f"{number:04d}.json").write_text(json.dumps(asdict(kill)))


def kills_left(folder: Path) -> list[Kill]:
    return [Kill(**json.loads(file.read_text())) for file in sorted((folder / "plan").glob("*.json"))]


def events(folder: Path) -> list[dict[str, Any]]:
    """The log, in order: points (boundary, when, step, tokens) and kills (victim too)."""
    file = folder / "events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def note(folder: Path, **facts: Any) -> None:
    line = json.dumps({"time": time.time(), "pid": os.getpid(), **facts})
    with (folder / "events.jsonl").open("a") as file:  # one short write: lines of several processes do not mix
        file.write(line + "\n")


def passing(boundary: str, when: str, step: int, tokens: int = 0) -> None:
    """Notes that the run passes a point, and kills if that is what the plan has next."""
    folder = Path(os.environ[FAULTS])
    if boundary != "score":
        note(folder, boundary=boundary, when=when, step=step, tokens=tokens)
    file = next(iter(sorted((folder / "plan").glob("*.json"))), None)
    if file is None:
        return
    # Another process of the run was faster, or the last death of this victim has not been noticed yet.
    with suppress(FileNotFoundError, LookupError):
        kill = Kill(**json.loads(file.read_text()))
        if (kill.boundary, kill.when) == (boundary, when) and step >= kill.step:
            victim = find(folder, kill.victim)
            file.rename(file.with_suffix(".done"))
            _kill(folder, kill, victim, step)


def _kill(folder: Path, kill: Kill, victim: psutil.Process, step: int) -> None:
    note(folder, victim=kill.victim, boundary=kill.boundary, when=kill.when, step=step, killed=victim.pid)
    if kill.victim == RAYLET:
        (folder / UNNOTICED).touch()
    victim.send_signal(signal.SIGKILL)
    end = time.monotonic() + GONE_S
    while _lives(victim):
        assert time.monotonic() < end, f"{kill.victim} {victim} does not die"
        time.sleep(0.005)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def numbers(folder: Path) -> dict[str, int]:
    """Numbers of the flow process and of the actors that live, by name."""
    found: dict[str, int] = json.loads((folder / "processes.json").read_text())
    return found


def find(folder: Path, victim: str) -> psutil.Process:
    """A process of this kind; LookupError when none lives."""
    known = numbers(folder)
    if victim == FLOW:
        return psutil.Process(known[FLOW])
    actors = [number for name, number in known.items() if name.startswith(_ACTOR.get(victim, ""))]
    try:
        if victim in _ACTOR:
            living = (psutil.Process(number) for number in actors)
            return next(process for process in living if _lives(process))
        family = psutil.Process(known[FLOW]).children(recursive=True)
        if victim == RAYLET:
            return next(process for process in family if process.name() == "raylet" and _lives(process))
        return next(_scoring(family))
    except (StopIteration, psutil.NoSuchProcess):
        raise LookupError(victim) from None


_ACTOR = {WORKER: "ActorRolloutRefWorker", ENGINE: "RolloutWorker"}


def _scoring(family: Sequence[psutil.Process]) -> Iterator[psutil.Process]:
    for process in family:
        with suppress(psutil.Error):
            if "multiprocessing.spawn" in " ".join(process.cmdline()) and _lives(process):
                yield process


def score(response: str, row: dict[str, Any]) -> float:
    """The scorer of runs under test: the share of digits in their right place, as it passes points of its own."""
    step, wanted = last_step(), row["reward_model"]["ground_truth"]
    passing("score", "before", step)
    right: float = sum(a == b for a, b in zip(response.strip(), wanted, strict=False)) / len(wanted)
    passing("score", "after", step)
    return right


def last_step() -> int:
    """The step that was begun last."""
    file = Path(os.environ[FAULTS]) / "step"
    return int(file.read_text()) if file.exists() else 0
