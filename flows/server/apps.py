"""The apps that `rollforward up` and `rollforward ui` serve with uvicorn: Prefect and MLflow, each behind a guard."""

import os
import sys
from pathlib import Path

from flows.server.guard import Guard
from flows.server.service_file import SERVERS_SECRET
from rl_core.runtime.private import read_secret
from tasks.tracking.tracker import local_tracking_uri


def serve_command(app: str, port: int) -> list[str]:
    """The command line that serves `prefect` or `mlflow` on a port of the loopback address."""
    factory = f"flows.server.apps:{app}_app"
    options = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning", "--no-server-header"]
    return [sys.executable, "-m", "uvicorn", "--factory", factory, *options]


def prefect_app() -> Guard:
    """Prefect's server, which checks the secret itself; without PREFECT_SERVER_API_AUTH_STRING it does not start."""
    from prefect.server.api.server import create_app
    from prefect.settings import PREFECT_SERVER_API_AUTH_STRING

    if not PREFECT_SERVER_API_AUTH_STRING.value():
        raise ValueError("PREFECT_SERVER_API_AUTH_STRING is not set: the server would answer everybody")
    return Guard(create_app(final=True), None)


def mlflow_app() -> Guard:
    """MLflow's server on the database and the artifact folder that runs without a server also use."""
    home = Path(os.environ["ROLLFORWARD_HOME"])
    from mlflow.server.constants import ARTIFACT_ROOT_ENV_VAR, BACKEND_STORE_URI_ENV_VAR
    from mlflow.server.fastapi_app import app

    # MLflow opens its stores at the first request.
    os.environ |= {
        BACKEND_STORE_URI_ENV_VAR: local_tracking_uri(home),
        ARTIFACT_ROOT_ENV_VAR: (home / "mlartifacts").as_uri(),
    }
    return Guard(app, read_secret(home, SERVERS_SECRET))
