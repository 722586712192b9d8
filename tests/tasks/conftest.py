import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_servers import Server

from tasks.tracking.tracker import configure_mlflow, mlflow_client

configure_mlflow()


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


@pytest.fixture
def server(sqlite_uri: str, tmp_path: Path) -> Iterator[Server]:
    server = Server(sqlite_uri, tmp_path)
    server.start()
    yield server
    server.kill()
