"""Runs under test from their first start to their end, however often they die, and what comes out of them."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
from support_faults import FAULTS, GONE_S, Kill, events, kills_left, write_plan
from support_flows import environment
from support_training import MOVING

COMMAND = Path(__file__).parent / "faults/command.py"
RUN = "crash"
SETTINGS = [
    "algorithm.estimator=gae",
    "data.difficulty=3",
    "data.train_batch_size=8",
    "data.train_rows=512",
    "data.val_rows=16",
    "actor.mini_batch_size=4",
    "critic.optim.lr=1e-3",
    "rollout.n=2",
    "reward.function=support_faults:score",
    "warm_start.steps=20",
    "trainer.segment_steps=2",
    "evaluation.sampled_n=1",
    "gate.min_score=0",  # the model hardly learns
    "gate.reload=false",
]
POOL = ["rollout.mode=one_step_off", "rollout.ranks_per_node=1"]
MOVING_COLUMNS = {"score_seconds", "score_wait"}
QUICK = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "2"}
"""Ray looks more often than by default (5 times, every 3 s) whether a raylet lives."""
ATTEMPT_S = 1800
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Cell:
    """What a kill has cost, and whether the step that it hit is what it is without."""

    victim: str
    boundary: str
    when: str
    step: int
    seconds: float
    """From the kill until the run did something that it had not done before."""
    tokens: int
    """Tokens of finished rollouts that were sampled again."""
    equal: bool

    def text(self) -> str:
        return f"{self.seconds:.1f} s, {self.tokens} tokens, {'equal' if self.equal else 'NOT EQUAL'}"


@dataclass
class Trial:
    """A run in a home folder of its own; the same command is given again each time that its process is killed."""

    home: Path
    steps: int
    settings: list[str] = field(default_factory=list)
    plan: list[Kill] = field(default_factory=list)
    attempts: int = 0
    seconds: float = 0.0

    @property
    def faults(self) -> Path:
        return self.home / "faults"

    @property
    def folder(self) -> Path:
        return self.home / "runs" / RUN

    def run(self) -> None:
        """To its end; AssertionError with the last words when it ends in any other way."""
        write_plan(self.faults, self.plan)
        start, code = time.monotonic(), -9
        while code == -9:
            assert self.attempts <= len(self.plan), f"{self.home} dies without being killed: {self.log()}"
            self.attempts += 1
            code = self._attempt()
        self.seconds = time.monotonic() - start
        assert code == 0, f"{self.home} ended with {code}: {self.log()}"

    def _attempt(self) -> int:
        settings = [*SETTINGS, *self.settings, f"trainer.steps={self.steps}"]
        with (self.home / "output.log").open("a") as log:
            return subprocess.run(
                [sys.executable, str(COMMAND), "run", "demo", "--run", RUN, *settings],
                env={**environment(self.home), **QUICK, FAULTS: str(self.faults)},
                stdout=log, stderr=log, timeout=ATTEMPT_S, check=False,
            ).returncode  # fmt: skip

    def log(self) -> str:
        return (self.home / "output.log").read_text()[-3000:]

    def kills_left(self) -> list[Kill]:
        return kills_left(self.faults)

    def weights(self) -> dict[str, str]:
        """Checksum of each exported file but the card, which names its MLflow run."""
        manifest = json.loads((self.folder / f"export/step_{self.steps:06d}/manifest.json").read_text())
        return {file["path"]: file["sha256"] for file in manifest["files"] if file["path"] != "README.md"}

    def step(self, step: int) -> tuple[dict[str, float], dict[str, Any]]:
        """The metrics of a step, and its rollouts with the rows that they are of."""
        record = json.loads((self.folder / f"ledger/step_{step:06d}.json").read_text())
        rollouts = pq.read_table(self.folder / f"rollouts/step_{step:06d}.parquet")
        columns = {name: rollouts[name].to_pylist() for name in rollouts.column_names if name not in MOVING_COLUMNS}
        metrics = {name: value for name, value in record["metrics"].items() if not MOVING.match(name)}
        return metrics, columns

    def cells(self, reference: "Trial") -> list[Cell]:
        """Each kill that happened."""
        log = events(self.faults)
        kills = [number for number, event in enumerate(log) if "victim" in event]
        unequal = {step for step in range(1, self.steps + 1) if self.step(step) != reference.step(step)}
        found = []
        for number, following in zip(kills, [*kills[1:], len(log)], strict=True):
            event = log[number]
            seconds, tokens = cost(log[:number], event, log[number + 1 : following])
            step = min(event["step"], self.steps)
            equal = not unequal & {step, step + 1} and self.weights() == reference.weights()
            found.append(Cell(event["victim"], event["boundary"], event["when"], event["step"], seconds, tokens, equal))
        return found


Key = tuple[str, str, int]


def cost(before: list[dict[str, Any]], kill: dict[str, Any], after: list[dict[str, Any]]) -> tuple[float, int]:
    """Seconds until something new was done, and the tokens of rollouts that were made again.

    Between a kill and its discovery a run may go on; what it did until its workers started anew is done again, too.
    """
    done = {_key(event) for event in before}
    later: set[Any] = set()
    seconds, tokens = 0.0, 0
    for event in after:
        if event["boundary"] == "start":
            done, later, seconds = done | later, set(), 0.0
            continue
        if _key(event) in done:
            tokens += event["tokens"]
        elif not seconds:
            seconds = event["time"] - kill["time"]
        later.add(_key(event))
    return seconds, tokens


def _key(event: dict[str, Any]) -> Key:
    return event["boundary"], event["when"], event["step"]


def problems(trial: Trial, reference: Trial) -> list[str]:
    """What is not as in the run that nothing disturbed, or is left over, in words."""
    from mlflow import MlflowClient

    name, found = trial.home.name, []
    if trial.weights() != reference.weights():
        found.append(f"{name}: other weights")
    found += [f"{name}: step {s} differs" for s in range(1, trial.steps + 1) if trial.step(s) != reference.step(s)]
    scores = f"evaluation/step_{trial.steps:06d}.json"
    if json.loads((trial.folder / scores).read_text()) != json.loads((reference.folder / scores).read_text()):
        found.append(f"{name}: other scores")
    client = MlflowClient(f"sqlite:///{trial.home}/mlflow.db")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    for key in run.data.metrics:
        steps = [point.step for point in client.get_metric_history(run.info.run_id, key)]
        if len(steps) != len(set(steps)):
            found.append(f"{name}: MLflow has {key} twice for a step")
    if [p.step for p in client.get_metric_history(run.info.run_id, "reward/mean")] != list(range(1, trial.steps + 1)):
        found.append(f"{name}: MLflow does not have every step")
    if run.info.status != "FINISHED":
        found.append(f"{name}: MLflow says {run.info.status}")
    versions = client.search_model_versions("")
    aliases = {alias: int(n) for alias, n in client.get_registered_model(versions[0].name).aliases.items()}
    if len(versions) != 1 or aliases != {"champion": 1, "candidate": 1}:
        found.append(f"{name}: versions {[v.version for v in versions]}, aliases {aliases}")
    return found + [f"{name}: {words}" for words in left_over(trial)]


def left_over(trial: Trial) -> list[str]:
    """Processes of a run that has ended, and what the doctor finds in its home folder."""
    from tasks.runs.leftovers import leftovers

    end = time.monotonic() + GONE_S
    while (living := [p for p in psutil.process_iter() if _of(p, trial)]) and time.monotonic() < end:
        time.sleep(0.5)
    words = [f"process {process.pid} is left: {process.name()}" for process in living]
    return words + [finding.seen for finding in leftovers(trial.home) if finding.level != "ok"]


def _of(process: psutil.Process, trial: Trial) -> bool:
    try:
        return bool(process.environ().get(FAULTS) == str(trial.faults))
    except psutil.Error:
        return False


def shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir() if path.stat().st_uid == os.getuid()}
