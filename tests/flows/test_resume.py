"""A run that dies continues where it was committed and ends like one that was never disturbed."""

import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from support_flows import COMMAND, SMALL, Result, environment, rollforward
from support_training import MOVING

from rl_core.storage import Store

RUN = ["run", "demo", "--run", "small", *SMALL]


def kill_tree(process: subprocess.Popen) -> None:
    """SIGKILL for the process and all that it started, at once."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=20)


def start(home: Path, until: str, arguments: list[str] = RUN) -> subprocess.Popen:
    """Starts the run, in a process group of its own, and returns when its output holds `until`."""
    process = subprocess.Popen(
        [COMMAND, *arguments], env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    read_until(process, until)
    return process


def read_until(process: subprocess.Popen, text: str) -> str:
    """What the process prints, up to the line with the text."""
    assert process.stdout is not None
    seen = ""
    while text not in seen:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    return seen


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


def test_sigterm_lets_the_step_end_and_says_how_to_go_on(tmp_path: Path) -> None:
    process = start(tmp_path, "step 1/6", [*RUN, "trainer.save_every=3"])
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert "asked to stop: the step that is under way ends first (about " in output
    told = re.search(r"stopped at step (\d) of 6\n.*\n +this continues from the last committed step:\n +(.*)", output)
    assert told and told[1] == re.findall(r"step (\d)/6", output)[-1] and int(told[1]) > 1, output
    store = Store(str(tmp_path / "runs/small"))
    assert store.committed_steps("checkpoints") == [int(told[1])], "between two checkpoints, too"
    ended(tmp_path, family)
    command = shlex.split(told[2])
    assert command[:3] == ["rollforward", "run", "demo"] and command[-2:] == ["--run", "small"]
    # Without a grace period the step is abandoned, wherever it is.
    process = start(tmp_path, f"step {int(told[1]) + 1}/6", [*command[1:], "trainer.grace_s=0"])
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "the step that is under way ends" not in output, output
    assert f"stopped at step {told[1]} of 6" in output or f"stopped at step {int(told[1]) + 1} of 6" in output


def test_a_second_ctrl_c_abandons_the_step_and_commits_the_one_before(tmp_path: Path) -> None:
    scorer = ["reward.function=support_rewards:slow_when_told", "reward.timeout_s=90", "warm_start.steps=0"]
    process = start(tmp_path, "step 1/6", [*RUN, *scorer, "trainer.grace_s=40"])
    family = psutil.Process(process.pid).children(recursive=True)
    (tmp_path / "slow").touch()
    time.sleep(1)
    begun = time.monotonic()
    # As a terminal does it: every process of the group gets it, Prefect's server too.
    os.killpg(process.pid, signal.SIGINT)
    output = read_until(process, "asked to stop")
    assert time.monotonic() - begun < 10, "a signal is answered while a call is waited for"
    os.killpg(process.pid, signal.SIGINT)
    output += process.communicate(timeout=60)[0]
    assert process.returncode == 130 and time.monotonic() - begun < 30, output
    assert "the step that is under way ends first" in output
    told = re.search(r"stopped at step (\d) of 6", output)
    assert told and told[1] == (re.findall(r"step (\d)/6", output) or ["1"])[-1], output
    ended(tmp_path, family)


def ended(home: Path, family: list[psutil.Process]) -> None:
    """Nothing is left of the run `small` but what it committed, and everybody says that it was stopped."""
    from mlflow import MlflowClient

    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    assert re.search(r"^  small .* stopped ", rollforward(home, "runs").output, re.MULTILINE)
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert run.info.status == "KILLED"
    with (home / "locks/small.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_two_processes_cannot_work_on_one_run(tmp_path: Path) -> None:
    process = start(tmp_path, "prepare data")
    try:
        second = rollforward(tmp_path, *RUN)
        assert second.code == 2
        assert f"process {process.pid}" in second.output
    finally:
        kill_tree(process)
