"""The real command in a process of its own, with the environment that a user has."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

COMMAND = str(Path(sys.executable).parent / "rollforward")
# What the suite's own conftest sets for its process must not leak into a user's command.
OURS = ("RAY_", "PREFECT_", "MLFLOW_", "ROLLFORWARD_")
SMALL = [
    "data.train_batch_size=8",
    "actor.mini_batch_size=4",
    "data.val_rows=32",
    "data.train_rows=128",
    "rollout.n=4",
    "warm_start.steps=20",
    "trainer.steps=6",
    "trainer.segment_steps=3",
    "evaluation.sampled_n=1",
    "gate.min_score=0",  # the model hardly learns
    "gate.reload=false",  # it loads another model
]


@dataclass
class Result:
    """How a command ended and what it printed."""

    code: int
    output: str
    seconds: float


def environment(home: Path) -> dict[str, str]:
    """A user's environment with this home folder."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    tests = Path(__file__).parent
    # The code beside these tests, whichever is installed.
    return {**clean, "ROLLFORWARD_HOME": str(home), "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}


def rollforward(home: Path, *arguments: str, timeout: float = 1500, folder: Path | None = None) -> Result:
    """Runs the command to its end, in the working directory `folder`; `timeout` in seconds only ends what hangs."""
    start = time.monotonic()
    done = subprocess.run(
        [COMMAND, *arguments],
        env=environment(home),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Result(done.returncode, done.stdout, time.monotonic() - start)
