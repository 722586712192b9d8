"""The login of this process at MLflow servers of its home folder; the secret is sent to no other address."""

import base64
import os
from functools import cache
from typing import Any
from urllib.parse import urlsplit

USER = "rollforward"
"""User name at the MLflow server; the server checks the password only."""
_PROVIDER = "rollforward"
_LOGINS: dict[str, str] = {}
"""Authorization header by host and port."""


def log_in(address: str, secret: str) -> None:
    """Sends the secret with requests of this process to the MLflow server at `address`, a loopback address."""
    port = urlsplit(address).port
    header = "Basic " + base64.b64encode(f"{USER}:{secret}".encode()).decode()
    _LOGINS.update({f"{host}:{port}": header for host in ("127.0.0.1", "localhost")})
    os.environ.setdefault("MLFLOW_TRACKING_AUTH", _PROVIDER)


@cache
def register_login() -> None:
    """Makes the login known to MLflow; imports MLflow."""
    from mlflow.tracking.request_auth import registry

    # Variables such as MLFLOW_TRACKING_PASSWORD would be sent to every server. MLflow's own way is an entry point of
    # the installed package, which a checkout that was installed earlier lacks.
    registry._request_auth_provider_registry.register(_LoginProvider)


class _LoginProvider:
    """What MLflow calls `RequestAuthProvider`."""

    def get_name(self) -> str:
        return _PROVIDER

    def get_auth(self) -> Any:
        return _add_login


def _add_login(request: Any) -> Any:
    """The prepared request of the library `requests`, with the login of its address if there is one."""
    if header := _LOGINS.get(urlsplit(request.url).netloc):
        request.headers["Authorization"] = header
    return request
