"""Deployments on a real Prefect server with worker and MLflow server: what the tutorial in docs/operations.md does,
and what happens when processes die meanwhile.

One story: each test goes on where the one before it ended.
"""

import json
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil
import pytest
import yaml
from support_attacks import EVIL, answer, attacks, family, is_loopback, listening
from support_flows import Result, environment, rollforward
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin, Subprotocol

from flows.server.deploy import DEPLOYMENTS
from flows.server.ports import check_port
from flows.server.prefect_api import PrefectApi, basic_login
from flows.server.service_file import running_services
from flows.server.services import service_processes
from rl_core.runtime.private import read_secret
from rl_core.runtime.process import Process
from rl_core.storage.run_files import step_name
from tasks.tracking.login import log_in

TINY = [
    "data.train_batch_size=8",
    "data.train_rows=128",
    "data.val_rows=8",
    "actor.mini_batch_size=8",
    "rollout.n=4",
    "data.difficulty=2",
    "warm_start.steps=40",
    "actor.entropy_coef=0.01",  # weights that no reward moves would stay, and with them the version
    "trainer.steps=12",
    "trainer.segment_steps=4",
    "evaluation.sampled_n=1",
    "gate.min_score=0",  # the model hardly learns
    "gate.reload=false",  # it loads another model
]


@dataclass
class Place:
    """A home folder with its services."""

    home: Path
    api: str
    mlflow: str

    @property
    def server(self) -> PrefectApi:
        return PrefectApi(self.api, read_secret(self.home, "servers"))

    def prefect(self, *arguments: str) -> Result:
        """Runs Prefect's command."""
        start = time.monotonic()
        added = {"PREFECT_API_URL": self.api, "PREFECT_API_AUTH_STRING": self.server.secret}
        added |= {"PREFECT_HOME": str(self.home / "prefect"), "DO_NOT_TRACK": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
            env=environment(self.home) | added,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
        )  # fmt: skip
        return Result(done.returncode, done.stdout, time.monotonic() - start)

    def deployment_run(
        self, name: str, parameters: dict[str, Any], watch: bool = True
    ) -> tuple[Result, dict[str, Any]]:
        """Runs a deployment by Prefect's command; returns what it printed, and the flow run as the server knows it."""
        done = self.prefect(
            "deployment", "run", name, "--params", json.dumps(parameters), *(["--watch"] if watch else [])
        )
        number = next((line.split()[-1] for line in done.output.splitlines() if "UUID:" in line), None)
        return done, self.flow_run(number) if number else {}

    def flow_run(self, number: str) -> dict[str, Any]:
        run: dict[str, Any] = self.server.get(f"/flow_runs/{number}")
        return run

    def last_run(self, deployment: str) -> dict[str, Any]:
        """The newest flow run of a deployment that has started; empty when there is none."""
        started = {"flow_runs": {"start_time": {"is_null_": False}}, "deployments": {"name": {"any_": [deployment]}}}
        runs: list[dict[str, Any]] = self.server.post(
            "/flow_runs/filter", {**started, "sort": "START_TIME_DESC", "limit": 1}
        )
        return runs[0] if runs else {}

    def active_runs(self) -> list[dict[str, Any]]:
        """Flow runs that are due, or that a worker has taken."""
        states = {"state": {"type": {"any_": ["SCHEDULED", "PENDING", "RUNNING"]}}}
        runs: list[dict[str, Any]] = self.server.post("/flow_runs/filter", {"flow_runs": states})
        return runs

    def wait(self, number: str, state: str, seconds: float = 300) -> dict[str, Any]:
        """The flow run when it is in the state."""
        until(
            lambda: self.flow_run(number)["state_type"] == state,
            seconds,
            lambda: self.log() + str(self.flow_run(number)),
        )
        return self.flow_run(number)

    def process_of(self, number: str) -> psutil.Process:
        """The process of the last attempt at a flow run."""
        kept = json.loads((self.home / "attempts" / f"{number}.json").read_text())
        process = Process(**kept["process"]).find()
        assert process, "the attempt has ended"
        return process

    def log(self) -> str:
        return (self.home / "logs/worker.log").read_text()[-3000:]

    def committed(self, run: str) -> list[str]:
        return sorted(file.parent.name for file in (self.home / "runs" / run).glob("checkpoints/*/manifest.json"))

    def aliases(self) -> dict[str, str]:
        from tasks.registry.registry import Registry

        return Registry(self.mlflow, "rollforward-demo").aliases()


def until(true: Callable[[], Any], seconds: float, told: Callable[[], str] = str) -> None:
    end = time.monotonic() + 3 * seconds  # beside other tests
    while True:
        with suppress(OSError):  # beside other tests a server may answer late
            if true():
                return
        assert time.monotonic() < end, told()
        time.sleep(0.3)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    home, prefect, mlflow = tmp_path_factory.mktemp("ops"), free_port(), free_port()
    done = rollforward(home, "up", "--prefect-port", str(prefect), "--mlflow-port", str(mlflow))
    assert done.code == 0, done.output
    place = Place(home, f"http://127.0.0.1:{prefect}/api", f"http://127.0.0.1:{mlflow}")
    log_in(place.mlflow, place.server.secret)
    assert place.server.secret not in done.output
    yield place
    rollforward(home, "down")


@pytest.fixture(scope="module")
def first(place: Place) -> dict[str, Any]:
    """A flow run of post-train that is under way."""
    assert rollforward(place.home, "deploy", folder=place.home).code == 0
    again = rollforward(place.home, "deploy", folder=place.home)
    assert again.code == 0 and again.output.count("unchanged") == 4, again.output
    done, run = place.deployment_run("post-train/post-train", {"run_name": "first", "overrides": TINY}, watch=False)
    assert run, done.output
    return place.wait(run["id"], "RUNNING")


def test_up_again_starts_nothing(place: Place) -> None:
    services = running_services(place.home)
    again = rollforward(place.home, "up")
    assert "(already running)" in again.output and running_services(place.home) == services


def test_a_service_that_died_comes_back_where_the_others_look_for_it(place: Place) -> None:
    process = running_services(place.home)["mlflow"].process.find()
    assert process
    process.kill()
    process.wait(10)
    assert rollforward(place.home, "up").code == 0
    assert running_services(place.home)["mlflow"].address == place.mlflow


def test_other_pages_hosts_and_users_get_no_answer_of_the_servers(place: Place, first: dict[str, Any]) -> None:
    deployment = place.server.get("/deployments/name/post-train/post-train")["id"]
    requests: list[tuple[str, Any]] = [
        (f"{place.api}/deployments/filter", {}),
        (f"{place.api}/deployments/{deployment}/create_flow_run", {"parameters": {"recipe": "demo"}}),
        (f"{place.api}/flow_runs/{first['id']}", None),
        (f"{place.mlflow}/", None),
        (f"{place.mlflow}/health", None),
        (f"{place.mlflow}/api/2.0/mlflow/experiments/search?max_results=1", None),
        (f"{place.mlflow}/api/2.0/mlflow/experiments/create", {"name": "planted"}),
        (f"{place.mlflow}/ajax-api/3.0/mlflow/assistant/config", None),
    ]
    before = len(place.active_runs())
    for what, headers in attacks(place.server.secret):
        for url, body in requests:
            assert answer(url, headers, body) in (401, 403), (what, url)
            assert answer(url, headers, method="OPTIONS") in (401, 403), (what, url)
    for url, body in requests[:2]:  # with the secret alone, as a form of another site could send it
        assert answer(url, {"Authorization": basic_login(place.server.secret)}, body) == 403
    own = {"Origin": place.mlflow, "Authorization": basic_login(f"rollforward:{place.server.secret}")}
    assert answer(requests[3][0], own) == answer(requests[5][0], own) == 200
    with pytest.raises(InvalidStatus, match="403"):
        connect(f"{place.api.replace('http', 'ws')}/events/in", origin=Origin(EVIL))
    with connect(f"{place.api.replace('http', 'ws')}/events/in", subprotocols=[Subprotocol("prefect")]) as stranger:
        stranger.send(json.dumps({"type": "auth", "token": "guessed"}))
        with pytest.raises(ConnectionClosed):
            stranger.recv(timeout=30)
    assert len(place.active_runs()) == before


def test_a_flow_run_cannot_bring_its_own_command(place: Place, first: dict[str, Any]) -> None:
    """Neither as a job variable of the worker, nor by a setting."""
    deployment = place.server.get("/deployments/name/evaluate/evaluate")["id"]
    planted, command = place.home / "planted", f"touch {place.home}/planted"
    for variables in ({"command": command}, {"env": {"PYTHONSTARTUP": "x"}}, {"working_dir": "/"}, {"env.A": "x"}):
        with pytest.raises(HTTPError, match="422"):
            place.server.post(f"/deployments/{deployment}/create_flow_run", {"job_variables": variables})
    settings = {"recipe": "demo", "overrides": [f"agent.mcp_servers={json.dumps([command])}"]}
    run = place.server.post(f"/deployments/{deployment}/create_flow_run", {"parameters": settings})
    failed = place.wait(run["id"], "FAILED")
    assert "overrides that name no code" in failed["state"]["message"] and not planted.exists()


def test_an_overlapping_training_is_refused_by_name(place: Place, first: dict[str, Any]) -> None:
    done, run = place.deployment_run("retrain/retrain-nightly", {"overrides": TINY})
    assert done.code != 0 and run["state_type"] == "CANCELLED", done.output
    assert f"flow run demo ({first['id']}) is training" in run["state"]["message"]


def test_a_killed_flow_process_is_started_again_and_completes(place: Place, first: dict[str, Any]) -> None:
    until(lambda: place.committed("first"), 300, place.log)
    place.process_of(first["id"]).send_signal(signal.SIGKILL)
    run = place.wait(first["id"], "COMPLETED")
    # An overloaded server may report the same crash twice; each restart then ends the one before it.
    assert run["run_count"] >= 2, states_of(place.home, first["id"])
    assert place.committed("first")[-1] == "step_000012"
    assert place.log().count("supervised step 40/40") <= 1
    assert place.aliases() == {"champion": "1", "candidate": "1"}


def test_a_flow_run_that_is_retried_by_hand_trains_nothing_again(place: Place, first: dict[str, Any]) -> None:
    manifests = sorted((place.home / "runs/first").glob("checkpoints/*/manifest.json"))
    before = [file.stat().st_mtime_ns for file in manifests]
    kept = json.loads((place.home / "attempts" / f"{first['id']}.json").read_text())
    until(lambda: not Process(**kept["process"]).find(), 60, place.log)
    time.sleep(2)  # Prefect's worker has to notice, too, or it clears the folder away in which the next one starts
    starts = place.flow_run(first["id"])["run_count"]
    assert "scheduled for retry" in place.prefect("flow-run", "retry", first["id"]).output
    until(lambda: place.flow_run(first["id"])["run_count"] > starts, 120, place.log)
    place.wait(first["id"], "COMPLETED")
    assert [file.stat().st_mtime_ns for file in manifests] == before
    assert place.aliases() == {"champion": "1", "candidate": "1"}


def test_bad_parameters_make_no_flow_run_and_bad_settings_one_that_fails(place: Place, first: dict[str, Any]) -> None:
    refused, run = place.deployment_run("post-train/post-train", {"max_hours": -1})
    assert refused.code != 0 and not run and "max_hours" in refused.output
    failed, run = place.deployment_run("post-train/post-train", {"overrides": ["trainer.stepz=1"]})
    assert failed.code != 0 and run["state_type"] == "FAILED" and run["run_count"] == 1
    told = run["state"]["message"]
    assert all(part in told for part in ("expected:", "seen: trainer.stepz", "where:", "fix:")), told


def test_an_event_starts_a_retraining_that_survives_its_worker(place: Place, first: dict[str, Any]) -> None:
    """The retraining goes on from the champion, and another worker takes it over when its heartbeat is missed."""
    deploy_own(place, active=False)
    sent = place.prefect("event", "emit", "rollforward.data_updated", "--resource-id", "rows-of-today")
    assert sent.code == 0, sent.output
    until(lambda: place.last_run("retrain-nightly").get("state_type") == "RUNNING", 120, place.log)
    run = place.last_run("retrain-nightly")
    name = f"demo-{run['id'][:8]}"
    until(lambda: place.committed(name), 300, place.log)
    worker = running_services(place.home)["worker"].process.find()
    assert worker
    for process in [worker, *worker.children(recursive=True)]:
        process.kill()
    assert rollforward(place.home, "up").code == 0
    scores, evaluation = place.deployment_run("evaluate/evaluate", {"overrides": TINY})
    assert evaluation["state_type"] == "COMPLETED", scores.output
    assert place.wait(run["id"], "COMPLETED")["run_count"] >= 2
    config = json.loads((place.home / f"runs/{name}/run.json").read_text())["config"]
    assert "cache/versions" in config["model"]["path"] and config["warm_start"]["steps"] == 0


def test_a_schedule_finds_nothing_to_do(place: Place, first: dict[str, Any]) -> None:
    before = place.last_run("retrain-nightly")["id"]
    deploy_own(place, active=True)
    until(lambda: place.last_run("retrain-nightly")["id"] != before, 120, place.log)
    run = place.wait(place.last_run("retrain-nightly")["id"], "COMPLETED")
    assert run["auto_scheduled"] and "nothing to do" in run["state"]["message"]
    for schedule in place.server.get("/deployments/name/retrain/retrain-nightly")["schedules"]:
        paused = place.prefect("deployment", "schedule", "pause", "retrain/retrain-nightly", schedule["id"])
        assert paused.code == 0 or not schedule["active"], paused.output
    until(lambda: not place.active_runs(), 120, place.log)  # the next training would be refused while one is active


def test_a_version_that_the_gate_refused_is_promoted_by_force_and_rolled_back(
    place: Place, first: dict[str, Any]
) -> None:
    assert place.aliases() == {"champion": "1", "candidate": "2"}
    refused, run = place.deployment_run("promote/promote", {"version": 2})
    assert run["state_type"] == "FAILED" and "gate" in run["state"]["message"], refused.output
    promoted, run = place.deployment_run("promote/promote", {"version": "2", "force": True})
    assert run["state_type"] == "COMPLETED", promoted.output
    assert place.aliases()["champion"] == "2" and place.aliases()["previous"] == "1"
    assert place.deployment_run("rollback/rollback", {})[1]["state_type"] == "COMPLETED"
    assert place.aliases()["champion"] == "1"


def states_of(home: Path, number: str) -> list[tuple[str, str]]:
    """Types and messages of all states that a flow run had, in the server's database."""
    with closing(sqlite3.connect(home / "prefect/prefect.db")) as database:
        words = "select type, message from flow_run_state where replace(flow_run_id, '-', '') = ? order by timestamp"
        found: list[tuple[str, str]] = database.execute(words, [number.replace("-", "")]).fetchall()
    return found


@pytest.fixture(scope="module")
def endless(place: Place, first: dict[str, Any]) -> dict[str, Any]:
    """A flow run in the middle of its training."""
    place.wait(first["id"], "COMPLETED")
    settings = [*TINY, "trainer.steps=500", "trainer.segment_steps=500"]
    _, run = place.deployment_run("post-train/post-train", {"overrides": settings, "run_name": "ended"}, watch=False)
    until(lambda: place.committed("ended") != [], 300, place.log)
    return run


def test_every_port_of_servers_and_runs_is_on_the_loopback_address(place: Place, endless: dict[str, Any]) -> None:
    """Nearly all ask for a secret as well: the servers for that of the home folder, Ray's processes for its token, the
    worker for the token of a flow run (the channel by which it announces a cancellation). The store and the connections
    of a process group, and the figures of Ray's autoscaler, ask for none: users of this machine can reach them."""
    processes = [*service_processes(place.home), place.process_of(endless["id"])]
    ports = listening(processes)
    owners = " ".join(ports.values())
    assert {int(url.split(":")[2].partition("/")[0]) for url in (place.api, place.mlflow)} <= {
        port for _, port in ports
    }
    assert all(name in owners for name in ("gcs_server", "raylet", "ray::", "worker start")), ports
    assert {place: owner for place, owner in ports.items() if not is_loopback(place[0])} == {}


def test_the_secret_is_in_no_command_line_and_no_file(place: Place, endless: dict[str, Any]) -> None:
    secrets = [file.read_bytes() for file in (place.home / "secrets").iterdir()]
    assert len(secrets) == 2
    for process in [member for root in service_processes(place.home) for member in family(root)]:
        with suppress(psutil.Error):
            assert not any(secret.decode() in " ".join(process.cmdline()) for secret in secrets)
    for file in place.home.rglob("*"):
        if file.is_file() and file.parent.name != "secrets":
            with suppress(FileNotFoundError):
                content = file.read_bytes()
                assert not any(secret in content for secret in secrets), file


def test_down_leaves_nothing(place: Place, endless: dict[str, Any]) -> None:
    process = place.process_of(endless["id"])
    ended = rollforward(place.home, "down")
    assert ended.code == 0 and "flow run demo, cancelled" in ended.output, ended.output
    log = (place.home / "logs/worker.log").read_text().rpartition("train  to step 500")[2]
    assert "stopping after the current step" in log
    last = re.findall(r"step +(\d+)/500", log)[-1]
    assert place.committed("ended")[-1] == step_name(int(last)), log
    states = states_of(place.home, endless["id"])
    assert states[-1][0] == "CANCELLED" and "CRASHED" not in dict(states), states
    assert not process.is_running() and service_processes(place.home) == [] and running_services(place.home) == {}
    for address in (place.api.removesuffix("/api"), place.mlflow):
        check_port(int(address.rpartition(":")[2]))


def deploy_own(place: Place, active: bool) -> None:
    """Applies deployments of one's own: the recipe's settings, and a schedule that is due at once."""
    file = yaml.safe_load(DEPLOYMENTS.read_text())
    (nightly,) = (one for one in file["deployments"] if one["name"] == "retrain-nightly")
    nightly["parameters"]["overrides"] = [*TINY, "gate.min_effect=0.99"]  # no version is so much better
    nightly["schedules"] = [{"slug": f"often-{active}", "interval": 15, "active": active}]
    own = place.home / "own.yaml"
    own.write_text(yaml.safe_dump(file))
    done = rollforward(place.home, "deploy", str(own), folder=place.home)
    assert done.code == 0, done.output
