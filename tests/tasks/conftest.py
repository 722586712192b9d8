from collections.abc import Iterator
from pathlib import Path

import pytest
from support_servers import Server

from tasks.tracking.tracker import configure_mlflow

configure_mlflow()


@pytest.fixture
def server(sqlite_uri: str, tmp_path: Path) -> Iterator[Server]:
    server = Server(sqlite_uri, tmp_path)
    server.start()
    yield server
    server.kill()
