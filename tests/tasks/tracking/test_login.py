"""The secret of the home folder goes to its own MLflow server, and to no other."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tasks.tracking import login
from tasks.tracking.login import log_in
from tasks.tracking.outage import server_problem
from tasks.tracking.tracker import mlflow_client


class Server(ThreadingHTTPServer):
    """Keeps the logins that it was sent, and answers nothing that MLflow expects."""

    def __init__(self) -> None:
        self.logins: list[str | None] = []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.logins.append(self.headers.get("Authorization"))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Server]]:
    monkeypatch.setattr(login, "_LOGINS", {})
    monkeypatch.setenv("MLFLOW_TRACKING_AUTH", "")
    monkeypatch.delenv("MLFLOW_TRACKING_AUTH")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    both = Server(), Server()
    yield both
    for server in both:
        server.shutdown()
        server.server_close()


def test_only_the_own_server_is_sent_the_secret(servers: tuple[Server, Server]) -> None:
    own, other = servers
    log_in(own.url, "s3cret")
    for server in servers:
        assert server_problem(server.url) is None
        with suppress(Exception):  # what it answers is no JSON
            mlflow_client(server.url).get_run("a" * 32)
    assert server_problem(own.url.replace("127.0.0.1", "localhost")) is None
    assert own.logins == ["Basic cm9sbGZvcndhcmQ6czNjcmV0"] * 3
    assert other.logins == [None, None]
