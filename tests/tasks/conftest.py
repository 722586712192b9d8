import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_core.errors import InputError
from tasks.tracking import check_tracking, mlflow_client, quiet_mlflow

quiet_mlflow()


@pytest.fixture(scope="session")
def migrated_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with all its tables: making them takes seconds, copying the file does not."""
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    mlflow_client(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def sqlite_uri(migrated_database: Path, tmp_path: Path) -> str:
    shutil.copy(migrated_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
    """A real MLflow server on a database file, in its own process group so that it dies with its workers."""

    def __init__(self, database: str, root: Path) -> None:
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.command = [
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
            "--backend-store-uri", database, "--artifacts-destination", str(root / "served"),
        ]  # fmt: skip
        self.log = root / "server.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                return check_tracking(self.uri)
            except InputError:
                time.sleep(0.2)
        raise AssertionError(self.log.read_text())

    def kill(self) -> None:
        if self.process:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture
def server(sqlite_uri: str, tmp_path: Path) -> Iterator[Server]:
    server = Server(sqlite_uri, tmp_path)
    server.start()
    yield server
    server.kill()
