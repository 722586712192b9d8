"""The environment of a driver process, set before torch, Ray, Prefect or MLflow are imported.

Everything that they keep goes below the home folder, nothing reports to anybody, and their chatter is off.
"""

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

DEFAULT_HOME = ".rollforward"
SERVICES = "services.json"
"""File in the home folder that says which services `rollforward up` has started."""
_LIBRARIES = {
    "OMP_NUM_THREADS": "1",  # the driver only moves small tensors
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def home_folder() -> Path:
    """The absolute home folder: ROLLFORWARD_HOME, or `.rollforward` in the working directory."""
    return Path(os.environ.get("ROLLFORWARD_HOME", DEFAULT_HOME)).expanduser().absolute()


@dataclass(frozen=True)
class Process:
    """A process that later commands must find again; `started` (seconds since 1970) tells it from one that has its
    number after a restart of the machine."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> "Process":
        """The process that has the number now."""
        return cls(pid, psutil.Process(pid).create_time())

    def find(self) -> psutil.Process | None:
        """The process, or None when it has ended."""
        try:
            process = psutil.Process(self.pid)
            ended = abs(process.create_time() - self.started) > 1 or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return None if ended else process


@dataclass(frozen=True)
class Service:
    """A service of this home folder: its process, where it answers (empty when it does not), and its log."""

    process: Process
    address: str
    log: str


def noted_services(home: Path) -> dict[str, Service]:
    """The services that `rollforward up` has started, by name, though some may have ended by themselves."""
    try:
        text = (home / SERVICES).read_text()
    except FileNotFoundError:
        return {}
    return {
        name: Service(Process(**entry["process"]), entry["address"], entry["log"])
        for name, entry in json.loads(text).items()
    }


def read_services(home: Path) -> dict[str, Service]:
    """Those of them that still run; empty when there are none."""
    return {name: service for name, service in noted_services(home).items() if service.process.find()}


def write_services(home: Path, services: dict[str, Service]) -> None:
    """Notes the services of this home folder; none removes the note."""
    file = home / SERVICES
    if not services:
        file.unlink(missing_ok=True)
        return
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps({name: asdict(service) for name, service in services.items()}, indent=1))
    draft.replace(file)


def prepare_libraries() -> None:
    """Sets the variables that a command needs which only reads; what the user has set already stays."""
    for name, value in _LIBRARIES.items():
        os.environ.setdefault(name, value)


def prepare_environment(home: Path, verbose: bool = False) -> None:
    """Sets the variables; what the user has set already stays, except where a wrong value breaks the run."""
    prepare_libraries()
    prefect = home / "prefect"
    defaults = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_task_events_report_interval_ms": "0",  # Ray's GCS would remember 100,000 calls
        "RAY_worker_niceness": "0",  # by default Ray gives its workers what others leave of a core
        "PREFECT_HOME": str(prefect),
        "PREFECT_LOCAL_STORAGE_PATH": str(prefect / "storage"),
        "PREFECT_MEMO_STORE_PATH": str(prefect / "memo_store.toml"),
        "PREFECT_SERVER_LOGGING_LEVEL": "INFO" if verbose else "ERROR",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "INFO" if verbose else "CRITICAL",
        "PREFECT_INTERNAL_LOGGING_LEVEL": "ERROR" if verbose else "CRITICAL",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_CLI_PROMPT": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    for name, service in read_services(home).items():
        if variable := {"prefect": "PREFECT_API_URL", "mlflow": "MLFLOW_TRACKING_URI"}.get(name):
            os.environ.setdefault(variable, service.address)
    if "PREFECT_API_URL" not in os.environ:
        # A run's own server does not come back, so the flow need not wait a minute for it twice.
        os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "3")
    if "RAY_ADDRESS" not in os.environ and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(_ray_token(home))


def _ray_token(home: Path) -> Path:
    """A file with the secret that this home folder's Ray processes share."""
    token = home / "ray" / "token"
    token.parent.mkdir(parents=True, exist_ok=True)
    if not token.exists():
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
    return token
