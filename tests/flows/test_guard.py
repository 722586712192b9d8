"""The guard in front of the servers, asked by what a browser or another program would send."""

import base64
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from flows.server.guard import Guard, KeyGuard

SECRET = "a" * 64
HERE = "127.0.0.1:5000"


async def page(_request: Any) -> PlainTextResponse:
    return PlainTextResponse("answered")


async def socket(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text("answered")


APP = Starlette(routes=[Route("/{rest:path}", page, methods=["GET", "POST"]), WebSocketRoute("/ws", socket)])


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


def status(guard: Guard, **headers: str) -> int:
    given = {"Host": HERE, "Authorization": f"Bearer {SECRET}"} | headers
    client = TestClient(guard, raise_server_exceptions=True)
    return client.get("/api/x", headers={name: value for name, value in given.items() if value}).status_code


@pytest.mark.parametrize(
    "login", [f"Bearer {SECRET}", basic(f"rollforward:{SECRET}"), basic(SECRET), f"basic {basic(SECRET)[6:]}"]
)
def test_whoever_knows_the_secret_is_answered(login: str) -> None:
    assert status(Guard(APP, SECRET), Authorization=login) == 200


@pytest.mark.parametrize(
    "login",
    [
        "", "Bearer", "Bearer ", f"Bearer {SECRET[1:]}", SECRET, f"Digest {SECRET}", basic("rollforward:"), basic(""),
        "Basic %%", "Basic é", basic(f"{SECRET}:x"), f"Bearer {SECRET} x",
    ],
)  # fmt: skip
def test_without_the_secret_nothing_is_answered(login: str) -> None:
    client = TestClient(Guard(APP, SECRET), base_url=f"http://{HERE}")
    headers = {b"Authorization": login.encode("latin-1")} if login else {}
    for path in ("/", "/health", "/api/x"):
        answer = client.get(path, headers=headers)
        assert answer.status_code == 401 and answer.headers["WWW-Authenticate"].startswith("Basic"), path
        assert "answered" not in answer.text and client.options(path, headers=headers).status_code == 401


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("evil.example:5000", ""), ("evil.example", ""), ("127.0.0.1.evil:5000", ""), ("127.0.0.1@evil:5000", ""),
        (HERE, "http://evil.example"), (HERE, "null"), (HERE, "http://127.0.0.1:9999"), (HERE, "http://127.0.0.1"),
        (HERE, "http://127.0.0.1:5000.evil.example"), (HERE, "http://evil.example:5000"), (HERE, "http://[::1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("secret", [SECRET, None])
def test_other_hosts_and_pages_are_refused_even_with_the_secret(host: str, origin: str, secret: str | None) -> None:
    assert status(Guard(APP, secret), Host=host, Origin=origin) == 403


@pytest.mark.parametrize("host", [HERE, "localhost:5000", "[::1]:5000"])
@pytest.mark.parametrize("origin", ["", "http://127.0.0.1:5000", "http://localhost:5000"])
def test_own_pages_are_answered(host: str, origin: str) -> None:
    assert status(Guard(APP, SECRET), Host=host, Origin=origin) == 200


def test_a_websocket_is_guarded_too() -> None:
    client = TestClient(Guard(APP, None), base_url=f"http://{HERE}")
    with client.websocket_connect("/ws", headers={"Host": HERE}) as own:
        assert own.receive_text() == "answered"
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/ws", headers={"Origin": "http://evil.example"}):
        pass
    client = TestClient(Guard(APP, SECRET), base_url=f"http://{HERE}")
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/ws", headers={"Host": HERE}):
        pass


def test_the_guard_of_vllm_takes_its_key_and_answers_on_every_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    assert status(KeyGuard(APP), Host="gpu-7.lan:8000") == 200
    assert status(KeyGuard(APP), Host="gpu-7.lan:8000", Authorization="") == 401
    assert status(KeyGuard(APP), Host="gpu-7.lan:8000", Origin="http://evil.example") == 403
    monkeypatch.setenv("VLLM_API_KEY", "")
    with pytest.raises(ValueError, match="empty"):
        KeyGuard(APP)
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(KeyError):
        KeyGuard(APP)
