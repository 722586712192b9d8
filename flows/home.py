"""The home folder and the environment of a driver process, set before torch, Ray, Prefect or MLflow are imported.

These libraries store everything below the home folder; their telemetry and routine logging are off.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from flows.server.service_file import SERVERS_SECRET, running_services
from rl_core.credentials import CREDENTIALS_FIX, holds_credentials
from rl_core.errors import InputError
from rl_core.runtime.private import RAY_SECRET, private_folder, read_secret, secret_file
from tasks.tracking.login import log_in

if TYPE_CHECKING:
    from tasks.registry.registry import Registry

DEFAULT_HOME = ".rollforward"
ADDRESSES = (
    "PREFECT_API_URL",
    "PREFECT_UI_URL",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_REGISTRY_URI",
    "MLFLOW_S3_ENDPOINT_URL",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "FSSPEC_S3_ENDPOINT_URL",
)
"""Variables whose addresses libraries write to logs and error messages."""
_LIBRARIES = {
    "OMP_NUM_THREADS": "1",  # the driver only moves small tensors
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def home_folder() -> Path:
    """The absolute home folder: ROLLFORWARD_HOME, or `.rollforward` in the working directory."""
    return Path(os.environ.get("ROLLFORWARD_HOME", DEFAULT_HOME)).expanduser().absolute()


def prepare_home(verbose: bool) -> Path:
    """Creates the home folder, sets the environment of the libraries, and returns the folder.

    Raises InputError if the folder is not writable or belongs to another user, and for addresses with credentials in
    `ADDRESSES`: libraries write those to logs, error messages and databases.
    """
    home = home_folder()
    if found := [name for name in ADDRESSES if holds_credentials(os.environ.get(name, ""))]:
        raise InputError(
            expected="addresses without credentials",
            seen=f"credentials in {', '.join(found)}",
            where="environment",
            fix=CREDENTIALS_FIX,
        )
    from tasks.tracking.tracker import configure_mlflow

    try:
        prepare_environment(home, verbose)
    except OSError as error:
        raise InputError(
            expected="a writable home folder",
            seen=str(error),
            where=f"ROLLFORWARD_HOME={home}",
            fix="set ROLLFORWARD_HOME=FOLDER",
        ) from error
    configure_mlflow()
    return home


def open_registry(model: str | None, tracking_uri: str | None = None, verbose: bool = False) -> "Registry":
    """The registered model of that name, or the only one; uses the default MLflow if `tracking_uri` is None."""
    uri = registry_uri(tracking_uri, verbose)
    from tasks.registry.registry import Registry, only_model

    return Registry(uri, model or only_model(uri))


def registry_uri(tracking_uri: str | None = None, verbose: bool = False) -> str:
    """`tracking_uri`, or that of the default MLflow; raises InputError if it cannot be used."""
    home = prepare_home(verbose)
    from tasks.tracking.tracker import check_tracking, default_tracking_uri

    uri = tracking_uri or default_tracking_uri(home)
    check_tracking(uri)
    return uri


def prepare_libraries() -> None:
    """Sets the variables that a read-only command needs, except those already set."""
    for name, value in _LIBRARIES.items():
        os.environ.setdefault(name, value)


def prepare_environment(home: Path, verbose: bool = False) -> None:
    """Creates the home folder with mode 0700 and sets the variables of a driver process, except those already set."""
    private_folder(home)
    prepare_libraries()
    prefect = home / "prefect"
    defaults = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_task_events_report_interval_ms": "0",  # otherwise Ray's GCS keeps the last 100,000 calls in memory
        "RAY_worker_niceness": "0",  # by default Ray lowers the priority of its workers
        "PREFECT_HOME": str(prefect),
        "PREFECT_LOCAL_STORAGE_PATH": str(prefect / "storage"),
        "PREFECT_MEMO_STORE_PATH": str(prefect / "memo_store.toml"),
        "PREFECT_SERVER_LOGGING_LEVEL": "INFO" if verbose else "ERROR",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "INFO" if verbose else "CRITICAL",
        "PREFECT_INTERNAL_LOGGING_LEVEL": "ERROR" if verbose else "CRITICAL",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_CLI_PROMPT": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    use_servers(home)
    if "RAY_ADDRESS" not in os.environ and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(secret_file(home, RAY_SECRET))
    if "RAY_ADDRESS" not in os.environ:
        # Ray's name for "no other machine may join": all its ports are opened on the loopback address only.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def use_servers(home: Path) -> None:
    """Sets the addresses of the home folder's running servers, except those already set, and logs in to them.

    The secret goes to servers of this home folder only: to those of `rollforward up`, or to the one that a run starts
    for itself.
    """
    secret = read_secret(home, SERVERS_SECRET)
    running = running_services(home)
    if service := running.get("mlflow"):
        os.environ.setdefault("MLFLOW_TRACKING_URI", service.address)
        log_in(service.address, secret)
    own = running["prefect"].address if "prefect" in running else None
    api = os.environ.get("PREFECT_API_URL") or own
    if api is None:
        os.environ["PREFECT_SERVER_API_AUTH_STRING"] = os.environ["PREFECT_API_AUTH_STRING"] = secret
        os.environ["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] = "http://127.0.0.1"  # it serves no pages
        # The run's own server is never restarted, so retrying for a minute is pointless.
        os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "3")
        return
    os.environ["PREFECT_API_URL"] = api
    if own and _place(api) == _place(own):
        os.environ["PREFECT_API_AUTH_STRING"] = secret
    elif os.environ.get("PREFECT_API_AUTH_STRING") == secret:
        del os.environ["PREFECT_API_AUTH_STRING"]


def _place(url: str) -> tuple[str | None, int | None]:
    """Host and port of a URL, with one name for the loopback address."""
    parts = urlsplit(url)
    return parts.hostname and parts.hostname.replace("localhost", "127.0.0.1"), parts.port
