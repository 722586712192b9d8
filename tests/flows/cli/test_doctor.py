"""`rollforward doctor` finds what is wrong and what earlier runs left, says what to do, and touches nothing."""

import fcntl
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support_runs import make_run

import flows.cli.doctor_checks as doctor
from flows.cli.main import main
from flows.server.service_file import Service, write_services
from rl_core.rewards import programs
from rl_core.runtime.process import Process
from rl_core.storage.status import StatusWriter
from tasks.runs import leftovers
from tasks.runs.leftovers import held_locks

Command = Callable[..., tuple[int, dict[str, str], str]]
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLFORWARD_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "home"


@pytest.fixture
def command(home: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Exit code, what was said of each thing (`level text`), and all of the output."""

    def run(*words: str) -> tuple[int, dict[str, str], str]:
        code, text = main(["doctor", *words]), capsys.readouterr().out
        lines = re.findall(r"^. (ok|warning|problem) +(\S+(?: \S+)*)  +(.*)$", text, re.MULTILINE)
        return code, {what: f"{level} {said}" for level, what, said in lines}, text

    return run


def test_a_sound_machine_is_told_part_by_part(command: Command) -> None:
    start = time.monotonic()
    code, said, text = command()
    assert time.monotonic() - start < 60
    assert code == 0, text
    for what in ("python", "torch", "vllm", "ray", "prefect", "mlflow", "transformers", "machine", "disk", "home"):
        assert said[what].startswith(("ok", "warning")), text
    assert said["programs"] == "ok those written by the model are isolated in namespaces"
    assert said["leftovers"] == "ok none" and said["mlflow file"].startswith("ok sqlite")


def test_a_recipe_with_programs_is_refused_where_they_cannot_be_isolated(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "PROBE", "print(False)")
    programs.check_isolation.cache_clear()
    code, said, _ = command("demo", "reward.function=code")
    assert code == 2 and said["programs"].startswith("warning cannot be isolated: the limit of 64 processes")
    assert said["recipe"].startswith("problem the limit of 64 processes does not bind this user")
    _, said, _ = command("demo", "reward.function=code", "reward.code.isolation=none")
    assert said["programs"].startswith("warning Programs written by the model are not isolated")
    assert "a ground truth for the scorer `code`" in said["recipe"]  # digits are no tests of a program


def test_what_is_missing_is_a_problem_with_a_fix(home: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: "0.1" if name == "ray" else "9")
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", {"the MLflow UI": port})
        code, said, text = command()
        write_services(home, {"mlflow": Service(Process.of(os.getpid()), f"http://127.0.0.1:{port}", "")})
        (own,) = doctor._ports(home)
    assert code == 2
    assert (own.level, own.seen) == ("ok", "in use by a service of `rollforward up`")
    assert said["ray"].startswith("problem 0.1, required >=") and 'pip install "ray' in text
    assert said["prefect server"].startswith("problem") and "prefect server start" in text
    assert said[f"port {port}"].startswith("warning in use") and f"--port {port + 1}" in text


def test_a_recipe_is_checked_with_its_storage_and_servers(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = ["model.path=/no/model", f"storage.root={tmp_path}/file/runs", "tracking.uri=http://127.0.0.1:1"]
    code, said, text = command("demo", *settings)
    assert code == 2
    for what in ("recipe", "storage", "mlflow server"):
        assert said[what].startswith("problem"), text
    code, said, text = command("demo", f"storage.root={tmp_path}/runs")
    assert said["storage"].startswith("ok") and said["recipe"] == "ok demo can start", text
    assert list((tmp_path / "runs").iterdir()) == []
    assert main(["doctor", "dmeo"]) == 2


def test_a_home_that_cannot_be_written_is_a_problem(home: Path, command: Command) -> None:
    home.parent.joinpath("home").write_text("a file")
    assert command()[0] == 2


def test_leftovers_of_dead_runs_are_found_and_left_alone(home: Path, command: Command, tmp_path: Path) -> None:
    store = make_run(home, "dead", steps=2)
    writer = StatusWriter(store, 4, 2)
    writer.close("running")
    gone = subprocess.Popen(["true"])
    gone.wait()
    status = store.read_json("status.json") | {"pid": gone.pid, "stage": "train"}
    store.write_json("status.json", status)
    store.write_bytes("checkpoints/step_000003/state", b"")
    segment = tmp_path / "vllm_cpushm_7"
    segment.touch()
    os.utime(segment, (0, 0))
    env = {**os.environ, "RAY_AUTH_TOKEN_PATH": str(home / "secrets/ray")}
    raylet = subprocess.Popen(["raylet", *SLEEP[1:]], executable=SLEEP[0], env=env)
    try:
        code, said, text = command()
        assert code == 0, text
        assert said["run"] == "warning dead stopped in stage train at step 2: its process died" and "--run dead" in text
        assert said["uncommitted"].endswith("runs/dead/checkpoints/step_000003")
        assert said["shared memory"].startswith("warning 1 unused segment") and f"rm -r {segment}" in text
        assert said["ray processes"].startswith("warning 1 Ray process") and f"kill {raylet.pid}" in text
        assert segment.exists() and raylet.poll() is None and "leftovers" not in said
    finally:
        raylet.kill()
        raylet.wait()


def test_a_lock_that_a_child_of_a_dead_process_holds_is_a_problem(home: Path, command: Command) -> None:
    make_run(home, "torn", steps=1)
    with (home / "locks/torn.lock").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert held_locks(home) == {"torn": os.getpid()}
        gone = subprocess.Popen(["true"])
        gone.wait()
        file.write(f"process {gone.pid} since 2026")
        file.flush()
        code, said, text = command()
        assert code == 2 and said["lock"].startswith("problem run torn is locked"), text
    assert held_locks(home) == {}
