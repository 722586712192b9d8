"""A run that dies continues where it was committed and ends like one that was never disturbed."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from support_flows import COMMAND, SMALL, Result, environment, rollforward

RUN = ["run", "demo", "--run", "small", *SMALL]
MOVING = re.compile(r"^(time|perf)/|^reward/(seconds_mean|seconds_max|wait)$")


def kill_tree(process: subprocess.Popen) -> None:
    """SIGKILL for the process and all that it started, at once."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=20)


def start(home: Path, until: str) -> subprocess.Popen:
    """Starts the run and returns when its output holds `until`."""
    process = subprocess.Popen(
        [COMMAND, *RUN], env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    seen = ""
    while until not in seen:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    return process


@pytest.fixture(scope="module")
def other_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def resumed(other_home: Path) -> Result:
    """The small run, killed after step 3 with everything that it started, and resumed by the same command."""
    kill_tree(start(other_home, "step 3/6"))
    committed = sorted((other_home / "runs/small/checkpoints").glob("*/manifest.json"))
    assert committed and not (other_home / "runs/small/checkpoints/step_000006").exists()
    return rollforward(other_home, *RUN)


def records(home: Path) -> list[dict]:
    files = sorted((home / "runs/small/ledger").iterdir())
    metrics = [json.loads(file.read_text())["metrics"] for file in files]
    return [{k: v for k, v in step.items() if not MOVING.match(k)} for step in metrics]


def files_of(home: Path, folder: str) -> dict[str, str]:
    manifest = json.loads((home / f"runs/small/{folder}/manifest.json").read_text())
    # The model card names its MLflow run.
    return {file["path"]: file["sha256"] for file in manifest["files"] if file["path"] != "README.md"}


def test_the_resumed_run_ends_with_the_same_weights(
    home: Path, small: Result, other_home: Path, resumed: Result
) -> None:
    assert small.code == 0, small.output
    assert resumed.code == 0, resumed.output
    assert files_of(home, "export/step_000006") == files_of(other_home, "export/step_000006")


def test_it_has_the_same_metrics_and_score(home: Path, small: Result, other_home: Path, resumed: Result) -> None:
    assert records(home) == records(other_home)
    score = "runs/small/evaluation/step_000006.json"
    assert json.loads((home / score).read_text()) == json.loads((other_home / score).read_text())


def test_it_did_not_repeat_what_was_committed(resumed: Result) -> None:
    assert "supervised step" not in resumed.output
    # Step 3 was killed as soon as it was done: its checkpoint may or may not have been committed by then.
    first = re.search(r"step (\d)/6", resumed.output)
    assert first and first[1] in ("3", "4", "5")


def test_mlflow_has_one_run_with_every_step_once(other_home: Path, resumed: Result) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{other_home}/mlflow.db")
    experiments = [e.experiment_id for e in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    assert run.info.status == "FINISHED"
    steps = [point.step for point in client.get_metric_history(run.info.run_id, "reward/mean")]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_finished_run_is_shown_and_not_repeated(other_home: Path, resumed: Result) -> None:
    again = rollforward(other_home, *RUN)
    assert again.code == 0, again.output
    assert not re.search(r"step +\d+/6  reward", again.output)
    assert "rollforward-demo 1" in again.output
    assert "version 2" not in rollforward(other_home, "models").output


def test_other_settings_under_the_same_name_are_refused(other_home: Path, resumed: Result) -> None:
    refused = rollforward(other_home, *RUN, "actor.optim.lr=1e-4")
    assert refused.code == 2
    assert "actor.optim.lr was" in refused.output and "Traceback" not in refused.output


def test_interrupting_ends_everything_and_says_how_to_go_on(tmp_path: Path) -> None:
    process = start(tmp_path, "step 1/6")
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert "continues from the last committed step" in output
    assert re.search(r"^  small .* stopped ", rollforward(tmp_path, "runs").output, re.MULTILINE)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []


def test_two_processes_cannot_work_on_one_run(tmp_path: Path) -> None:
    process = start(tmp_path, "prepare data")
    try:
        second = rollforward(tmp_path, *RUN)
        assert second.code == 2
        assert f"process {process.pid}" in second.output
    finally:
        kill_tree(process)
