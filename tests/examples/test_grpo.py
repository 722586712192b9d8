"""The example, run once as a user runs it, with fewer steps."""

import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/grpo.py"
MOST_LINES = 150
STEPS = 30  # with seed 0 the reward rises from 0.01 to 0.41
MARKER = "ROLLFORWARD_TEST_EXAMPLE"


@dataclass(frozen=True)
class Run:
    """Output lines of a run that has ended, the packages it imported, and the names of processes it left."""

    lines: list[str]
    packages: set[str]
    left: list[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("example")
    # Children inherit the marker, also those that leave the process group.
    env = {**os.environ, "PYTHONPATH": str(ROOT), MARKER: str(folder)}
    command = [sys.executable, "-X", "importtime", str(EXAMPLE), "--steps", str(STEPS), "--seed", "0"]
    # Files, not pipes: a process that is left would hold a pipe open, and the test would wait for its end.
    with open(folder / "output", "w") as output, open(folder / "errors", "w") as errors:
        done = subprocess.run(command, cwd=folder, env=env, stdout=output, stderr=errors, timeout=1500)
    lines = (folder / "output").read_text().splitlines()
    imports: list[str] = []
    others: list[str] = []
    for line in (folder / "errors").read_text().splitlines():
        (imports if line.startswith("import time:") else others).append(line)
    assert done.returncode == 0, "\n".join([*lines, *others])
    packages = {line.rpartition("|")[2].strip().partition(".")[0] for line in imports}
    return Run(lines, packages, _end_marked(str(folder)))


def _end_marked(folder: str) -> list[str]:
    """Kills the processes that have the marker; returns their names."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARKER) == folder:
                found.append(process.name())
                process.kill()
    return found


def test_the_reward_rises(run: Run) -> None:
    ends = re.fullmatch(r"mean reward ([\d.]+) -> ([\d.]+), greedy held-out score ([\d.]+)", run.lines[-1])
    assert ends, run.lines
    first, last, greedy = map(float, ends.groups())
    assert first < 0.1, "three guessed tokens of 64"
    assert last > first + 0.2, run.lines
    assert greedy > first + 0.2, run.lines


def test_a_line_per_step_has_reward_loss_canary_and_speed(run: Run) -> None:
    line = re.compile(r"step +(\d+)  reward [01]\.\d{3}  loss [+-]\d\.\d{4}  canary (\d\.\de-\d\d)  [\d,]+ tokens/s")
    found = [line.fullmatch(text) for text in run.lines if text.startswith("step")]
    assert all(found), run.lines
    assert [int(each[1]) for each in found if each] == list(range(1, STEPS + 1))
    assert max(float(each[2]) for each in found if each) < 1e-4, "in float32 both engines compute the same log-probs"


def test_it_imports_the_library_without_prefect_and_mlflow(run: Run) -> None:
    assert {"rl_core", "torch", "vllm"} <= run.packages
    assert not run.packages & {"prefect", "mlflow", "flows", "tasks"}


def test_it_leaves_no_process(run: Run) -> None:
    assert run.left == []


def test_the_file_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= MOST_LINES
