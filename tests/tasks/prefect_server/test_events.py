"""Moves are events of a Prefect server, when there is one."""

import logging
import socket
import time
from pathlib import Path

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.testing.utilities import prefect_test_harness
from support_attacks import EVIL, answer
from support_registry import registry_with

from flows.server.prefect_api import basic_login
from tasks.prefect_server.events import TIMEOUT_S, emit


def test_promotion_and_rollback_are_events_of_the_server(sqlite_uri: str, tmp_path: Path) -> None:
    registry = registry_with(sqlite_uri, tmp_path, {}, {})
    with prefect_test_harness(server_startup_timeout=600):
        for version in ("1", "2", "2"):
            registry.promote(version)
        registry.rollback()
        wanted = [("promoted", "1"), ("promoted", "2"), ("rolled_back", "1")]
        deadline = time.monotonic() + 120
        while (seen := events("sorter")) != wanted and time.monotonic() < deadline:
            time.sleep(0.5)
        assert seen == wanted
        # The server that Prefect starts for one process, as for a run, requires the secret of the home folder.
        for headers, status in (({}, 401), ({"Authorization": basic_login("guessed")}, 401), (own_login(), 200)):
            assert answer(f"{PREFECT_API_URL.value()}/flow_runs/filter", headers, {}) == status
            assert EVIL not in allowed_origins(f"{PREFECT_API_URL.value()}/flow_runs/filter")


def own_login() -> dict[str, str]:
    return {"Authorization": basic_login(str(PREFECT_API_AUTH_STRING.value()))}


def allowed_origins(url: str) -> str:
    headers = {"Origin": EVIL, "Access-Control-Request-Method": "POST"}
    return str(httpx.options(url, headers=headers).headers.get("Access-Control-Allow-Origin", "")).replace("*", EVIL)


def events(model: str) -> list[tuple[str, str]]:
    body = {"filter": {"resource": {"id": [f"rollforward.model.{model}"]}, "order": "ASC"}}
    with get_client(sync_client=True) as client:
        answer = client._client.post("/events/filter", json=body)
    return [
        (event["event"].removeprefix("rollforward."), event["payload"]["version"]) for event in answer.json()["events"]
    ]


@pytest.mark.parametrize("listens", [False, True])
def test_a_server_that_is_down_or_silent_neither_raises_nor_delays(
    listens: bool, caplog: pytest.LogCaptureFixture
) -> None:
    start = time.monotonic()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/api"
        with temporary_settings({PREFECT_API_URL: url}), caplog.at_level(logging.WARNING):
            emit("rollforward.promoted", "sorter", {})
    assert time.monotonic() - start < TIMEOUT_S + 30 and "was not sent" in caplog.text


def test_without_a_server_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        emit("rollforward.promoted", "sorter", {})
    assert caplog.text == ""
