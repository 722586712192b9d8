"""The Prefect server of a single run: when it may start early, and how long it is waited for."""

import subprocess
from http.client import BadStatusLine
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from flows.server import own_server
from flows.server.own_server import READY, OwnServer, start_server
from rl_core.errors import TransientError


def test_a_server_starts_early_only_where_one_of_this_version_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(own_server, "OwnServer", lambda folder: folder)
    folder = tmp_path / "prefect"
    folder.mkdir()
    assert start_server(tmp_path) is None and start_server(tmp_path, new=True)
    (folder / "prefect.db").touch()
    assert start_server(tmp_path) is None, "its creation was interrupted"
    (folder / READY).write_text("2.0")
    assert start_server(tmp_path) is None, "the database needs a migration"
    (folder / READY).write_text(version("prefect"))
    assert start_server(tmp_path) is not None
    (folder / "prefect.db").unlink()
    assert start_server(tmp_path) is None


@pytest.mark.parametrize("error", [OSError("500"), BadStatusLine("?")])
def test_a_server_that_answers_with_errors_is_not_asked_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    asked = 0

    def fail(*_: Any) -> None:
        nonlocal asked
        asked += 1
        raise error

    monkeypatch.setattr(own_server, "request_json", fail)
    server = started(tmp_path, "0.5")
    with pytest.raises(TransientError, match="ended with exit code 0"):
        server.wait()
    assert 1 <= asked <= 6 and not (tmp_path / READY).exists()


def test_the_version_is_noted_once_the_server_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_server, "request_json", lambda _: True)
    server = started(tmp_path, "60")
    server.wait()
    server.stop()
    assert (tmp_path / READY).read_text() == version("prefect")


def started(folder: Path, seconds: str) -> OwnServer:
    """A server whose process only sleeps."""
    server = object.__new__(OwnServer)
    server._folder, server.url = folder, "http://127.0.0.1:9/api"
    server._process = subprocess.Popen(["sleep", seconds])
    return server
