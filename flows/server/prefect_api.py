"""Requests to Prefect's server by commands that start too quickly to import Prefect."""

import base64
import json
import ssl
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError


@dataclass(frozen=True)
class PrefectApi:
    """The API at `url` of a server that requires the secret; every request raises OSError on failure."""

    url: str
    secret: str

    def get(self, path: str) -> Any:
        """JSON answer to a GET."""
        return request_json(f"{self.url}{path}", self._headers())

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """JSON answer to a POST."""
        client = str(uuid.uuid4())
        token = self.get(f"/csrf-token?client={client}")["token"]
        headers = {**self._headers(), "Prefect-Csrf-Client": client, "Prefect-Csrf-Token": token}
        return request_json(f"{self.url}{path}", headers, body)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": basic_login(self.secret)}


def basic_login(secret: str) -> str:
    """The value of the header `Authorization`."""
    return "Basic " + base64.b64encode(secret.encode()).decode()


def request_json(
    url: str, headers: Mapping[str, str] = {}, body: Mapping[str, Any] | None = None, timeout: float = 10.0
) -> Any:
    """JSON answer of a server to a GET, or to a POST of `body`. Raises OSError on failure."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read())


def api_problem(api: str) -> str | None:
    """An error message if no Prefect server answers at the URL, else None.

    A server that requires a login or whose certificate is not trusted counts as answering; Prefect's client handles
    both.
    """
    try:
        request_json(f"{api.rstrip('/')}/health")
    except (OSError, ValueError, HTTPException) as error:
        answers = isinstance(error, HTTPError) and error.code in (401, 403, 407)
        answers = answers or isinstance(getattr(error, "reason", None), ssl.SSLError)
        return None if answers else str(error) or type(error).__name__
    return None
