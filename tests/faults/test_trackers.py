"""Trackers that are down, slow, silent or locked: training goes on, and nothing is lost or doubled."""

import os
import re
import shutil
import socket
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from support_flows import COMMAND, SMALL, environment
from support_runs import SIZES
from support_servers import Server, free_port
from support_trackers import Proxy, commit, mlflow_run, points

from rl_core.config.compose import compose
from rl_core.errors import InputError, TransientError
from rl_core.runtime.process import Process
from rl_core.storage.status import Status
from tasks.runs.open_run import open_run
from tasks.runs.run import Run
from tasks.session.session import Session, open_session
from tasks.tracking import outage
from tasks.tracking.outage import Throttle
from tasks.tracking.stale_runs import STORE_TAG
from tasks.tracking.tracker import check_tracking, configure_mlflow, mlflow_client

configure_mlflow()
KEYS = ("reward/mean", "time/step", "rollforward/step")
ANSWERS = ("/logged-models", "/model-versions/create", "/registered-models/create", "/registered-models/alias")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of MLflow with all its tables."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow_client(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(scope="module")
def server(database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(database, folder / "mlflow.db")
    server = Server(f"sqlite:///{folder}/mlflow.db", folder)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.silent_paths = ""
    proxy.down()


@pytest.fixture
def sqlite_uri(database: Path, tmp_path: Path) -> str:
    shutil.copy(database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def models(uri: str, name: str) -> list[str]:
    """Status of each logged model of a run."""
    info = mlflow_run(uri, name).info
    found = mlflow_client(uri).search_logged_models([info.experiment_id], f"source_run_id = '{info.run_id}'")
    return [model.status.value for model in found]


def begin(home: Path, name: str, uri: str) -> Run:
    """A run that may be trained, in a home folder with its tracker at `uri`."""
    return open_run(compose("demo", [*SIZES, f"tracking.uri={uri}", "trainer.max_attempts=1"]), home, name)


def test_down_at_the_start_in_the_middle_and_at_the_end(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    run = begin(tmp_path, "outages", proxy.uri)
    proxy.down()
    with open_session(run) as session:
        for step in (0, 1, 2):
            commit(session.store, *range(1, step + 1)[-1:])
            session.tracking.flush(step)
        proxy.up()
        commit(session.store, 3)
        session.tracking.flush(3)
        assert points(proxy.uri, "outages")["reward/mean"] == [1, 2, 3]
        assert mlflow_run(proxy.uri, "outages").data.params["trainer.steps"] == "4"
        proxy.down()
        commit(session.store, 4)
        session.tracking.flush(4)
        with pytest.raises(TransientError, match="MLflow"):
            session.tracking.send(4)
    proxy.up()
    # How it ended could not be told, and four of the steps are there; the next attempt mends both.
    assert mlflow_run(proxy.uri, "outages").info.status == "RUNNING"
    run.lock.close()
    with open_session(begin(tmp_path, "outages", proxy.uri)) as session:
        session.tracking.send(4)
    assert points(proxy.uri, "outages") == {key: [1, 2, 3, 4] for key in KEYS}
    assert mlflow_run(proxy.uri, "outages").info.status == "FINISHED"


@pytest.mark.parametrize("error", [None, ValueError("broken"), TransientError("lost"), KeyboardInterrupt()])
def test_statuses_say_how_a_run_ended(sqlite_uri: str, tmp_path: Path, error: BaseException | None) -> None:
    try:
        with open_session(begin(tmp_path, "ended", sqlite_uri)) as session:
            session.tracking.flush(0)
            commit(session.store, 1)
            if error:
                raise error
    except BaseException as raised:
        assert raised is error  # noqa: PT017
    wanted = "FINISHED" if error is None else "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
    assert mlflow_run(sqlite_uri, "ended").info.status == wanted
    assert points(sqlite_uri, "ended")["reward/mean"] == [1]


@pytest.mark.parametrize("answer", ["experiments/create", "runs/create", "runs/log-batch", "runs/update"])
def test_an_answer_that_is_lost_doubles_nothing(proxy: Proxy, tmp_path: Path, answer: str) -> None:
    name = f"lost-{answer.replace('/', '-')}"
    with open_session(begin(tmp_path, name, proxy.uri)) as session:
        session.tracking.tracker.experiment = name
        commit(session.store, 1)
        proxy.lost[answer] = 1
        session.tracking.send(1)  # MLflow's client repeats the request
        assert proxy.lost[answer] == 0
        commit(session.store, 2)
        proxy.lost["runs/log-batch"] = 1
        session.tracking.flush_paced(2)  # here it does not
        assert proxy.lost["runs/log-batch"] == 0
        commit(session.store, 3)
        session.tracking.flush_paced(3)
    assert points(proxy.uri, name) == {key: [1, 2, 3] for key in KEYS}
    assert mlflow_run(proxy.uri, name).info.status == "FINISHED"


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_that_is_lost_registers_nothing_twice(proxy: Proxy, tmp_path: Path, answer: str) -> None:
    name = f"registered-{sum(map(ord, answer))}"
    with open_session(begin(tmp_path, name, proxy.uri)) as session:
        session.registry.name = name
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        proxy.lost[answer] = 1
        version = session.registry.register(
            folder, session.tracking.tracker.run_id, name, {"step": "1"}, {"score_after": 0.5}
        )
        session.registry.set_alias("candidate", version)
        assert proxy.lost[answer] == 0
        assert [info.version for info in session.registry.versions()] == [version]
        assert models(proxy.uri, name) == ["READY"]
        assert session.registry.aliases() == {"candidate": version}


def test_a_model_whose_upload_failed_is_registered_once(proxy: Proxy, tmp_path: Path) -> None:
    with open_session(begin(tmp_path, "upload", proxy.uri)) as session, pytest.MonkeyPatch.context() as patch:
        session.registry.name = "upload"
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        run_id = session.tracking.tracker.run_id
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        proxy.lost["config.json"] = 1
        with pytest.raises(TransientError):
            session.registry.register(folder, run_id, "upload", {}, {})
        assert session.registry.register(folder, run_id, "upload", {}, {}) == "1"
        assert models(proxy.uri, "upload") == ["READY"]


@pytest.mark.parametrize("fault", ["silent", "silent but healthy", "slow"])
def test_a_server_that_does_not_answer_takes_a_bounded_share_of_the_time(
    proxy: Proxy, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "_PROBE_TIMEOUT_S", 0.5)
    monkeypatch.setitem(outage._SHORT_TIMEOUTS, "MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setattr(Throttle, "MIN_BLOCK_S", 0.3)
    name = fault.replace(" ", "-")
    with open_session(begin(tmp_path, name, proxy.uri)) as session:
        session.tracking.send(0)
        proxy.silent_paths = {"silent": "/", "silent but healthy": "log-batch", "slow": ""}[fault]
        proxy.delay_s = 30.0 if fault == "slow" else 0.0
        calls, seconds = training(session, 30, monkeypatch)
        # A call costs its deadline of at least 0.5 s, and then a rest ten times as long begins.
        assert 1 <= calls <= 1 + seconds / 5 and seconds < 60
        proxy.silent_paths, proxy.delay_s = "", 0.0
        session.tracking.send(30)
    assert points(proxy.uri, name)["reward/mean"] == list(range(1, 31))


def training(session: Session, steps: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, float]:
    """Steps of 0.1 s: how many of them called MLflow, and their time in seconds."""
    begun, calls, flush = time.monotonic(), list[int](), session.tracking.flush

    def noted(step: int) -> None:
        calls.append(step)
        flush(step)

    with monkeypatch.context() as patch:
        patch.setattr(session.tracking, "flush", noted)
        for step in range(1, steps + 1):
            time.sleep(0.1)
            commit(session.store, step)
            session.tracking.flush_paced(step)
    return len(calls), time.monotonic() - begun


def test_rests_are_in_proportion_to_what_was_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    throttle = Throttle()
    for seconds, rest in ((0.9, 0.0), (3.0, 27.0), (30.0, 270.0), (0.1, 0.0)):
        assert throttle.ready
        with throttle.measure():
            now[0] += seconds
        assert throttle.ready == (rest == 0.0)
        now[0] += max(rest - 1, 0)
        assert throttle.ready == (rest == 0.0)
        now[0] += 1.5


def test_a_locked_file_loses_nothing(sqlite_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "_PROBE_TIMEOUT_S", 0.3)
    with closing(sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        check_tracking(sqlite_uri)
        with open_session(begin(tmp_path, "locked", sqlite_uri)) as session:
            start = time.monotonic()
            for step in (1, 2):
                commit(session.store, step)
                session.tracking.flush_paced(step)
            assert time.monotonic() - start < 20
            with pytest.raises(TransientError, match="locked"):
                session.registry.aliases()
            other.execute("ROLLBACK")
            commit(session.store, 3)
            session.tracking.send(3)
            other.execute("BEGIN IMMEDIATE")  # others may read
            commit(session.store, 4)
            session.tracking.flush(4)
            assert points(sqlite_uri, "locked")["reward/mean"] == [1, 2, 3]
            other.execute("ROLLBACK")
    assert points(sqlite_uri, "locked")["reward/mean"] == [1, 2, 3, 4]
    assert mlflow_run(sqlite_uri, "locked").info.status == "FINISHED"


def test_a_run_whose_process_is_gone_is_closed_by_the_next(sqlite_uri: str, tmp_path: Path) -> None:
    states = {"killed": "running", "living": "running", "told": "failed", "elsewhere": "running"}
    for name, state in states.items():
        with open_session(begin(tmp_path, name, sqlite_uri)) as session:
            session.tracking.flush(0)
            tracker = session.tracking.tracker
        # As a process leaves it that cannot tell how it ends.
        mlflow_client(sqlite_uri).update_run(tracker.run_id, status="RUNNING")
        if name == "elsewhere":
            tracker.set_tags({STORE_TAG: f"another-machine:{session.store.url}"})
        process = Process.of(os.getpid()) if name == "living" else Process(2**22 + 1, "boot 1")
        status = Status(state=state, **asdict(process), host=socket.gethostname(), beat=time.time())
        session.store.write_json("status.json", status.model_dump())
    with open_session(begin(tmp_path, "next", sqlite_uri)) as session:
        session.tracking.flush(0)
        seen = {name: mlflow_run(sqlite_uri, name).info.status for name in states}
    assert seen == {"killed": "KILLED", "living": "RUNNING", "told": "FAILED", "elsewhere": "RUNNING"}


def test_a_server_must_answer_before_a_first_start_only() -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(InputError, match="connection refused"):
        check_tracking(nobody)
    check_tracking(nobody, resuming=True)
    with pytest.raises(InputError, match=r"http://…"):
        check_tracking("mlflow.example", resuming=True)


class Command:
    """`rollforward run` in a process of its own, which tells how far it is."""

    def __init__(self, home: Path, *settings: str) -> None:
        # No patience: what is down here stays down until the test says otherwise.
        hasty = {"PREFECT_CLIENT_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        self.process = subprocess.Popen(
            [COMMAND, "run", "demo", "--run", "small", *SMALL, *settings], env={**environment(home), **hasty},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.output = ""

    def until(self, words: str) -> None:
        """Returns when it has printed them."""
        assert self.process.stdout
        while words not in self.output:
            line = self.process.stdout.readline()
            assert line, self.output
            self.output += line

    def kill_prefect(self) -> None:
        """SIGKILL for the Prefect server that the run has started for itself."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if "prefect.server.api" in " ".join(child.cmdline()):
                child.kill()
                return
        raise AssertionError("there is no Prefect server")

    def end(self) -> int:
        """Its exit code."""
        self.output += self.process.communicate(timeout=300)[0]
        return self.process.returncode


def test_a_run_outlives_its_trackers(proxy: Proxy, tmp_path: Path) -> None:
    settings = [f"tracking.uri={proxy.uri}", "trainer.max_attempts=2", "trainer.keep_checkpoints=6"]
    first = Command(tmp_path, *settings)
    first.until("step 2/6")
    proxy.down()
    first.kill_prefect()
    first.until("step 4/6")
    proxy.up()
    first.until("step 5/6")
    proxy.down()
    assert first.end() == 1, first.output
    assert "Traceback" not in first.output
    assert "register failed 2 times (trainer.max_attempts=2)" in first.output
    assert "to resume from the last committed step:" in first.output
    assert first.output.rstrip().endswith("--run small")

    second = Command(tmp_path, *settings)
    second.until("prepare data")
    proxy.up()
    second.until("▸ register")
    second.kill_prefect()
    assert second.end() == 0, second.output
    assert "the Prefect server is gone" in second.output and "Run small" in second.output
    assert not re.search(r"step +\d/6  reward", second.output)
    run = mlflow_run(proxy.uri, "small")
    assert run.info.status == "FINISHED" and run.data.tags["rollforward.data_hash"]
    found = points(proxy.uri, "small")
    assert found["reward/mean"] == [1, 2, 3, 4, 5, 6] and all(steps == sorted(set(steps)) for steps in found.values())
    assert models(proxy.uri, "small") == ["READY"]
