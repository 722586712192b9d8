"""Runs a Prefect server, its worker and an MLflow server in the background of this machine."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from flows.server.apps import serve_command
from flows.server.ports import check_port
from flows.server.prefect_api import PrefectApi, api_problem, basic_login
from flows.server.service_file import SERVERS_SECRET, Service, recorded_services, running_services, write_services
from rl_core.errors import InputError, TransientError
from rl_core.runtime.guardian import is_guardian
from rl_core.runtime.private import read_secret
from rl_core.runtime.process import Process

POOL = "rollforward"
MARK = "ROLLFORWARD_SERVICES"
"""Environment variable of every process started by the services; its value is the home folder."""
START_S = 180.0
"""Maximum wait for a service to start; the first start creates the databases."""
CANCEL_S = 60.0
"""Maximum wait for cancelled flow runs, which may still commit a step."""
STOP_S = 10.0
"""Maximum wait for a process after SIGTERM, and again after SIGKILL."""
SETTINGS = {
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # the minimum that Prefect accepts
    "PREFECT_WORKER_QUERY_SECONDS": "2",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_LEVEL": "INFO",
}
"""Environment of the services, in addition to that of every driver process."""


def up(
    home: Path, prefect_port: int | None, mlflow_port: int | None, report: Callable[[str], None]
) -> dict[str, Service]:
    """Starts the missing services of the home folder, waits until all of them answer, and returns them.

    Default ports are the previous ones, at first 4200 and 5000. Raises InputError for a port in use. Raises
    TransientError for a service that does not start, after stopping those that did.
    """
    services, recorded = running_services(home), recorded_services(home)
    before = set(services)

    def address(name: str, port: int | None, default: int) -> str:
        if name in services:
            return services[name].address
        if name in recorded:
            _stop_leftovers(home, recorded[name])
        # The previous port, where a surviving worker and surviving runs expect the server.
        known = urlsplit(recorded[name].address).port if name in recorded else None
        return _address(port or known or default, f"--{name}-port")

    mlflow = address("mlflow", mlflow_port, 5000)
    api = address("prefect", prefect_port, 4200).removesuffix("/api") + "/api"
    own_name = f"rollforward-{uuid.uuid4().hex[:8]}"  # unique: the server lists a dead worker as online for 90 s
    secret = read_secret(home, SERVERS_SECRET)
    server = PrefectApi(api, secret)
    worker = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"]
    # A shell that starts this in the background makes it ignore SIGINT, with which Prefect's worker stops itself.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for name in ("prefect", "mlflow"):
            if name not in before:
                at = {"prefect": api, "mlflow": mlflow}[name]
                command = serve_command(name, urlsplit(at).port or 0)
                services[name] = _start(home, name, command, at, _environment(server, mlflow, home, name))
        for name in ("prefect", "mlflow"):
            _wait(name, services[name], partial(_is_healthy, f"{services[name].address}/health", secret))
            report(f"{name} is ready at {services[name].address}")
        if "worker" not in before:
            _prepare_pool(server)
            environment = _environment(server, mlflow, home, "worker")
            services["worker"] = _start(home, "worker", [*worker, "--name", own_name], "", environment)
        known = None if "worker" in before else own_name
        _wait("worker", services["worker"], partial(_worker_online, server, known))
        report("worker is ready")
    except BaseException:
        stop_processes([service.process for name, service in services.items() if name not in before])
        raise
    write_services(home, services)
    return services


def down(home: Path, report: Callable[[str], None]) -> list[str]:
    """Cancels flow runs, then stops the services and all processes started by them; returns a line for each.

    Raises TransientError if a process does not end.
    """
    services = running_services(home)
    stopped = []
    if {"prefect", "worker"} <= services.keys():
        server = PrefectApi(services["prefect"].address, read_secret(home, SERVERS_SECRET))
        stopped = [f"flow run {name}, cancelled" for name in _cancel_runs(server, report)]
    # The worker first: it would start further runs, and it reports the last states to the server.
    for name in sorted(services, key=["worker", "mlflow", "prefect"].index):
        stop_processes([services[name].process])
        stopped.append(f"{name}, process {services[name].process.pid}")
        report(f"{name} stopped")
    left = service_processes(home)
    stop_processes([Process.of(process.pid) for process in left if process.is_running()])
    stopped += [f"leftover process {process.pid}" for process in left]
    write_services(home, {})
    return stopped


def service_processes(home: Path) -> list[psutil.Process]:
    """Processes started by services of this home folder, whoever their parent is now."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(home):
                found |= {member.pid: member for member in [process, *process.children(recursive=True)]}
        except psutil.Error:  # ended meanwhile, or owned by another user
            continue
    return [process for process in found.values() if not is_guardian(process)]  # guardians end by themselves


def stop_processes(processes: list[Process]) -> None:
    """Terminates the processes and their children, and kills those that do not end within `STOP_S`.

    Guardians among them end by themselves after their cleanup. Raises TransientError if a process does not end.
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


def _stop_leftovers(home: Path, service: Service) -> None:
    """Stops remaining processes of a dead service, which may hold its port."""
    rest = []
    for process in service_processes(home):
        with suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == service.process.pid:
                rest.append(Process.of(process.pid))
    stop_processes(rest)


def _address(port: int, option: str) -> str:
    check_port(port, option)
    return f"http://127.0.0.1:{port}"


def _environment(server: PrefectApi, mlflow: str, home: Path, name: str) -> dict[str, str]:
    """The environment of a service; flow runs inherit the worker's. MLflow's server reads the secret from its file."""
    logins = {"PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING", "MLFLOW_TRACKING_URI"}
    own = {key: value for key, value in os.environ.items() if key not in logins}
    added = {"ROLLFORWARD_HOME": str(home), MARK: str(home)}
    if name == "prefect":
        page = server.url.removesuffix("/api")
        added |= {
            "PREFECT_SERVER_API_AUTH_STRING": server.secret,
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"{page},{page.replace('127.0.0.1', 'localhost')}",
            "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
            "PREFECT_SERVER_UI_API_URL": server.url,
        }
    if name == "worker":
        added |= {
            "PREFECT_API_URL": server.url,
            "PREFECT_API_AUTH_STRING": server.secret,
            "MLFLOW_TRACKING_URI": mlflow,
        }
    return {**own, **SETTINGS, **added}


def _start(home: Path, name: str, command: list[str], address: str, environment: dict[str, str]) -> Service:
    log = home / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    return Service(Process.of(process.pid), address, str(log))


def _wait(name: str, service: Service, ready: Callable[[], bool]) -> None:
    start = time.monotonic()
    while not ready():
        if service.process.find() is None or time.monotonic() - start > START_S:
            last = "\n".join(Path(service.log).read_text(errors="replace").splitlines()[-5:])
            raise TransientError(f"{name} did not start; the last lines of {service.log}:\n{last}")
        time.sleep(0.3)


def _is_healthy(url: str, secret: str) -> bool:
    request = urllib.request.Request(url, headers={"Authorization": basic_login(secret)})
    try:
        with urllib.request.urlopen(request, timeout=3) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _prepare_pool(server: PrefectApi) -> None:
    """Creates or updates the pool before a worker takes flow runs from it."""
    os.environ |= {"PREFECT_API_URL": server.url, "PREFECT_API_AUTH_STRING": server.secret}
    from prefect import get_client

    from flows.server.pool import apply_pool

    with get_client(sync_client=True) as client:
        apply_pool(client, POOL)


def _worker_online(server: PrefectApi, name: str | None) -> bool:
    """Whether the worker of this name, or any worker if None, is online."""
    try:
        workers = server.post(f"/work_pools/{POOL}/workers/filter", {})
    except OSError:
        return False
    return any(worker["status"] == "ONLINE" and name in (None, worker["name"]) for worker in workers)


def _cancel_runs(server: PrefectApi, report: Callable[[str], None]) -> list[str]:
    """Cancels running and pending flow runs of the pool and waits for their end; returns their names."""
    active = {
        "flow_runs": {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}},
        "work_pools": {"name": {"any_": [POOL]}},
    }
    try:
        runs = server.post("/flow_runs/filter", active)
        for run in runs:
            report(f"cancelling flow run {run['name']}; its committed steps are kept")
            server.post(f"/flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLING"}})
        start = time.monotonic()
        while server.post("/flow_runs/filter", active) and time.monotonic() - start < CANCEL_S:
            time.sleep(0.5)
    except OSError as error:
        report(f"the Prefect server does not answer ({error}); flow runs end with their worker")
        return []
    return [run["name"] for run in runs]


def service_rows(services: Mapping[str, Service]) -> list[tuple[str, str]]:
    """Table rows of the services: name, address, process and log."""
    return [
        (name, f"{service.address or f'work pool {POOL}'}\nprocess {service.process.pid}, log {service.log}")
        for name, service in services.items()
    ]


def find_server(address: str | None) -> str:
    """The API URL of the Prefect server: `address`, or PREFECT_API_URL. Raises InputError if none answers."""
    api = (address or os.environ.get("PREFECT_API_URL", "")).rstrip("/")
    if not api:
        raise InputError(
            expected="a Prefect server",
            seen="none configured",
            where="--server and PREFECT_API_URL",
            fix="start one with `rollforward up`, or give its address with --server http://HOST:4200/api",
        )
    api = api if "api" in urlsplit(api).path.split("/") else f"{api}/api"
    if problem := api_problem(api):
        raise InputError(
            expected="a reachable Prefect server", seen=problem, where=api, fix="start it, or correct --server"
        )
    return api
