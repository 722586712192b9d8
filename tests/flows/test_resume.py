"""A run that is stopped says how to go on and does; one that is done is shown. tests/faults kills runs."""

import fcntl
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from support_flows import COMMAND, SMALL, Result, environment, rollforward

from rl_core.storage.store import Store

RUN = ["run", "demo", "--run", "small", *SMALL]
SLOW = [
    "reward.function=support_rewards:slow_when_told",
    "reward.timeout_s=900",
    "warm_start.steps=0",
    "trainer.grace_s=300",
]


def kill_tree(process: subprocess.Popen[str]) -> None:
    """SIGKILL for the process and all that it started, at once."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=60)


def start(home: Path, until: str, arguments: list[str] = RUN) -> subprocess.Popen[str]:
    """Starts the run, in a process group of its own, and returns when its output holds `until`."""
    process = subprocess.Popen(
        [COMMAND, *arguments], env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    read_until(process, until)
    return process


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """What the process prints, up to the line with the text."""
    assert process.stdout is not None
    seen = ""
    while text not in seen:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    return seen


def test_a_finished_run_is_shown_and_not_repeated(home: Path, small: Result) -> None:
    models = rollforward(home, "models").output
    again = rollforward(home, *RUN)
    assert small.code == again.code == 0, again.output
    assert not re.search(r"step +\d+/6  reward", again.output)
    assert re.search(r"rollforward-demo \d", again.output)
    assert "version 1" in models and rollforward(home, "models").output == models


def test_other_settings_under_the_same_name_are_refused(home: Path, small: Result) -> None:
    refused = rollforward(home, *RUN, "actor.optim.lr=1e-4")
    assert refused.code == 2
    assert "actor.optim.lr was" in refused.output and "Traceback" not in refused.output


def test_sigterm_lets_the_step_end_and_says_how_to_go_on(tmp_path: Path) -> None:
    process = start(tmp_path, "step 1/6", [*RUN, "trainer.save_every=3"])
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGTERM)  # as `timeout` and job schedulers send it
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 143, output
    assert "stopping after the current step (about " in output
    told = re.search(r"stopped at step (\d) of 6\n.*\n +to resume from the last committed step:\n +(.*)", output)
    assert told and told[1] == re.findall(r"step (\d)/6", output)[-1] and int(told[1]) > 1, output
    store = Store(str(tmp_path / "runs/small"))
    assert store.committed_steps("checkpoints") == [int(told[1])], "between two checkpoints, too"
    ended(tmp_path, family)
    command = shlex.split(told[2])
    assert command[:3] == ["rollforward", "run", "demo"] and command[-2:] == ["--run", "small"]
    # Without a grace period the step is abandoned, wherever it is.
    process = start(tmp_path, f"step {int(told[1]) + 1}/6", [*command[1:], "trainer.grace_s=0"])
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 143 and "after the current step" not in output, output
    assert f"stopped at step {told[1]} of 6" in output or f"stopped at step {int(told[1]) + 1} of 6" in output


def test_sigterm_to_all_processes_of_the_group_while_workers_start_and_while_a_version_is_loaded(
    tmp_path: Path,
) -> None:
    for stage, step in (("▸ warm start", 0), ("▸ reload", 6)):
        process = start(tmp_path, stage, [*RUN, "gate.reload=true"])
        time.sleep(1)
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 143, output
        assert f"stopped at step {step} of 6" in output and output.rstrip().endswith("--run small"), output
        ended(tmp_path, family)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A home folder, and a run in it whose second step takes longer than the tests."""
    home = tmp_path_factory.mktemp("slow")
    process = start(home, "step 1/6", [*RUN, *SLOW])
    (home / "slow").touch()
    try:
        yield home, process
    finally:
        if process.poll() is None:
            kill_tree(process)


def test_two_processes_cannot_work_on_one_run(slow: tuple[Path, subprocess.Popen[str]]) -> None:
    home, process = slow
    second = rollforward(home, *RUN, *SLOW)
    assert second.code == 2
    assert f"process {process.pid}" in second.output


def test_a_second_ctrl_c_abandons_the_step_and_commits_the_one_before(slow: tuple[Path, subprocess.Popen[str]]) -> None:
    home, process = slow
    family = psutil.Process(process.pid).children(recursive=True)
    begun = time.monotonic()
    # As a terminal does it: every process of the group gets it, Prefect's server too.
    os.killpg(process.pid, signal.SIGINT)
    output = read_until(process, "stopping after")
    assert time.monotonic() - begun < 100, "a signal is answered while a call is waited for"
    os.killpg(process.pid, signal.SIGINT)
    output += process.communicate(timeout=300)[0]
    assert process.returncode == 130 and time.monotonic() - begun < 250, output
    assert "stopping after the current step" in output
    told = re.search(r"stopped at step (\d) of 6", output)
    assert told and told[1] == (re.findall(r"step (\d)/6", output) or ["1"])[-1], output
    ended(home, family)


def ended(home: Path, family: list[psutil.Process]) -> None:
    """Nothing is left of the run `small` but what it committed, and everybody says that it was stopped."""
    from mlflow import MlflowClient

    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    assert re.search(r"^  small .* stopped ", rollforward(home, "runs").output, re.MULTILINE)
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert run.info.status == "KILLED"
    with closing(sqlite3.connect(home / "prefect/prefect.db")) as database:
        assert ("RUNNING",) not in database.execute("select state_type from flow_run").fetchall()
    with (home / "locks/small.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
