"""A Prefect server, its worker and an MLflow server in the background of this machine, for someone who has none."""

import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

import psutil

from flows.server.ports import check_port
from flows.server.service_file import Service, recorded_services, running_services, write_services
from rl_core.errors import InputError, TransientError
from rl_core.runtime.guardian import is_guardian
from rl_core.runtime.process import Process
from tasks.tracking.tracker import local_tracking_uri

POOL = "rollforward"
MARK = "ROLLFORWARD_SERVICES"
"""Variable in the environment of everything that a home folder's services have started: the home folder."""
START_S = 180.0
"""Longest wait for a service that starts; the first start makes the databases."""
CANCEL_S = 60.0
"""Longest wait for flow runs that were asked to end: a committed step may still be written."""
STOP_S = 10.0
"""Longest wait for a process that was asked to end."""
SETTINGS = {
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # the least that Prefect takes
    "PREFECT_WORKER_QUERY_SECONDS": "2",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_LEVEL": "INFO",
}
"""What the services are told beside the environment of every driver."""


def up(
    home: Path, prefect_port: int | None, mlflow_port: int | None, report: Callable[[str], None]
) -> dict[str, Service]:
    """The services of the home folder, those that were missing started; returns when all of them answer.

    Without ports those of before are taken, at first 4200 and 5000. Raises InputError for a port that is in use, and
    TransientError for a service that does not come up, after ending what was started.
    """
    services, noted = running_services(home), recorded_services(home)
    before = set(services)

    def address(name: str, port: int | None, default: int) -> str:
        if name in services:
            return services[name].address
        if name in noted:
            _end_rest(home, noted[name])
        # Where it was: the worker and runs that live on look for it there.
        known = urlsplit(noted[name].address).port if name in noted else None
        return _address(port or known or default, f"--{name}-port")

    mlflow = address("mlflow", mlflow_port, 5000)
    api = address("prefect", prefect_port, 4200).removesuffix("/api") + "/api"
    own_name = f"rollforward-{uuid.uuid4().hex[:8]}"  # of an earlier worker the server says for 90 s that it is there
    commands = {
        "prefect": (["prefect", "server", "start", *_listen(api)], api),
        "mlflow": (["mlflow", "server", *_stores(home), *_listen(mlflow)], mlflow),
        "worker": (["prefect", "worker", "start", "--pool", POOL, "--type", "process", "--name", own_name], ""),
    }
    # A shell that starts this in its background makes it ignore SIGINT, by which Prefect's worker ends itself.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for name in ("prefect", "mlflow"):
            if name not in before:
                services[name] = _start(home, name, *commands[name], _environment(home, api, mlflow, name))
        for name in ("prefect", "mlflow"):
            _wait(name, services[name], partial(_answers, f"{services[name].address}/health"))
            report(f"{name} answers at {services[name].address}")
        if "worker" not in before:
            services["worker"] = _start(home, "worker", *commands["worker"], _environment(home, api, mlflow, "worker"))
        _wait("worker", services["worker"], partial(_works, api, own_name if "worker" not in before else None))
        report("the worker takes flow runs")
    except BaseException:
        end([service.process for name, service in services.items() if name not in before])
        raise
    write_services(home, services)
    return services


def down(home: Path, report: Callable[[str], None]) -> list[str]:
    """Cancels flow runs, then ends the services and all that they have started; returns what was ended, in words.

    Raises TransientError when something does not go.
    """
    services = running_services(home)
    ended = []
    if {"prefect", "worker"} <= services.keys():
        ended = [f"flow run {name}, cancelled" for name in _cancel_runs(services["prefect"].address, report)]
    # The worker first: it would begin further runs, and it tells the server how the last ones ended.
    for name in sorted(services, key=["worker", "mlflow", "prefect"].index):
        end([services[name].process])
        ended.append(f"{name}, process {services[name].process.pid}")
        report(f"{name} has ended")
    left = leftovers(home)
    end([Process.of(process.pid) for process in left if process.is_running()])
    ended += [f"left by an earlier one: process {process.pid}" for process in left]
    write_services(home, {})
    return ended


def leftovers(home: Path) -> list[psutil.Process]:
    """Processes that services of this home folder have started, whoever is their parent now."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(home):
                found |= {member.pid: member for member in [process, *process.children(recursive=True)]}
        except psutil.Error:  # gone meanwhile, or another user's
            continue
    return [process for process in found.values() if not is_guardian(process)]  # they end by themselves


def end(processes: list[Process]) -> None:
    """Asks the processes and their children to end, and kills those that do not.

    Guardians among them end when they have done their work. Raises TransientError when one does not go.
    """
    roots = [found for one in processes if (found := one.find())]
    found = [member for root in roots for member in [*root.children(recursive=True), root]]
    guardians = [member for member in found if is_guardian(member)]
    family = [member for member in found if member not in guardians]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(family, timeout=STOP_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(alive, timeout=STOP_S)
    psutil.wait_procs(guardians, timeout=STOP_S)
    if alive:
        raise TransientError(f"processes do not end: {', '.join(str(process.pid) for process in alive)}")


def call(url: str, body: Mapping[str, Any] | None = None, timeout: float = 10.0) -> Any:
    """What a server answers as JSON; with a body it is posted. Raises OSError when there is no such answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read())


def _end_rest(home: Path, service: Service) -> None:
    """Ends what a service that has died left behind; it may hold the port."""
    rest = []
    for process in leftovers(home):
        with suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == service.process.pid:
                rest.append(Process.of(process.pid))
    end(rest)


def _address(port: int, option: str) -> str:
    check_port(port, option)
    return f"http://127.0.0.1:{port}"


def _listen(address: str) -> list[str]:
    host = address.removeprefix("http://").partition("/")[0]
    return ["--host", host.partition(":")[0], "--port", host.partition(":")[2]]


def _stores(home: Path) -> list[str]:
    """The database and the folder that runs use without a server too."""
    artifacts = (home / "mlartifacts").as_uri()
    return ["--backend-store-uri", local_tracking_uri(home), "--default-artifact-root", artifacts, "--workers", "1"]


def _environment(home: Path, api: str, mlflow: str, name: str) -> dict[str, str]:
    """The environment of a service; the worker hands its own to the flow runs."""
    added = {"ROLLFORWARD_HOME": str(home), MARK: str(home), "PREFECT_SERVER_UI_API_URL": api}
    if name == "worker":
        added |= {"PREFECT_API_URL": api, "MLFLOW_TRACKING_URI": mlflow}
    own = {key: value for key, value in os.environ.items() if key not in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")}
    return {**own, **SETTINGS, **added}


def _start(home: Path, name: str, module: list[str], address: str, environment: dict[str, str]) -> Service:
    log = home / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *module],
            env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    return Service(Process.of(process.pid), address, str(log))


def _wait(name: str, service: Service, ready: Callable[[], bool]) -> None:
    start = time.monotonic()
    while not ready():
        if service.process.find() is None or time.monotonic() - start > START_S:
            last = "\n".join(Path(service.log).read_text(errors="replace").splitlines()[-5:])
            raise TransientError(f"{name} does not come up; the last lines of {service.log}:\n{last}")
        time.sleep(0.3)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=3) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _works(api: str, name: str | None) -> bool:
    """Whether the worker of this name, or any one, asks for flow runs."""
    try:
        workers = call(f"{api}/work_pools/{POOL}/workers/filter", {})
    except OSError:  # the worker makes the pool
        return False
    return any(worker["status"] == "ONLINE" and name in (None, worker["name"]) for worker in workers)


def _cancel_runs(api: str, report: Callable[[str], None]) -> list[str]:
    """Cancels what the worker runs, or has been told to run now, and waits until it has ended; returns the names."""
    active = {
        "flow_runs": {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}},
        "work_pools": {"name": {"any_": [POOL]}},
    }
    try:
        runs = call(f"{api}/flow_runs/filter", active)
        for run in runs:
            report(f"flow run {run['name']} is cancelled; what it has committed stays")
            call(f"{api}/flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLING"}})
        start = time.monotonic()
        while call(f"{api}/flow_runs/filter", active) and time.monotonic() - start < CANCEL_S:
            time.sleep(0.5)
    except OSError as error:
        report(f"Prefect's server does not answer ({error}); flow runs end with their worker")
        return []
    return [run["name"] for run in runs]


def table(services: Mapping[str, Service]) -> list[tuple[str, str]]:
    """What runs, where it answers, its process and its log."""
    return [
        (name, f"{service.address or 'takes flow runs'}\nprocess {service.process.pid}, log {service.log}")
        for name, service in services.items()
    ]


def find_server(address: str | None) -> str:
    """The API of the Prefect server to use: the one that is given, or PREFECT_API_URL. InputError when none answers."""
    api = (address or os.environ.get("PREFECT_API_URL", "")).rstrip("/")
    if not api:
        fix = "start one with `rollforward up`, or name one with --server http://HOST:4200/api"
        raise InputError("a Prefect server", "none is known", "--server and PREFECT_API_URL", fix)
    api = api if "api" in urlsplit(api).path.split("/") else f"{api}/api"
    if problem := api_problem(api):
        raise InputError("a Prefect server that answers", problem, api, "start it, or correct --server")
    return api


def api_problem(api: str) -> str | None:
    """Why no Prefect server answers there; None when one does, if only that somebody has to log in or is not trusted:
    Prefect's own client knows how."""
    try:
        call(f"{api.rstrip('/')}/health")
    except (OSError, ValueError, HTTPException) as error:
        answers = isinstance(error, HTTPError) and error.code in (401, 403, 407)
        answers = answers or isinstance(getattr(error, "reason", None), ssl.SSLError)
        return None if answers else str(error) or type(error).__name__
    return None
