from pathlib import Path
from typing import Any

import pytest
from support_registry import checkpoint, contents, registry_with

from rl_core.errors import InputError
from tasks.registry.copies import copy_version
from tasks.registry.registry import Registry
from tasks.tracking.tracker import mlflow_client


def test_a_copy_under_another_name_is_made_once_with_tags_and_files(sqlite_uri: str, tmp_path: Path) -> None:
    source = registry_with(sqlite_uri, tmp_path, {}, {"gate": "passed"})
    source.promote("2")
    mlflow_client(sqlite_uri).set_model_version_tag("sorter", "2", "team", "ours")
    for _ in range(2):
        assert copy_version(source, "champion", "production", None, tmp_path / "cache") == "1"
    production = Registry(sqlite_uri, "production")
    (copy,) = production.versions()
    assert copy.aliases == () and copy.checkpoint == checkpoint(2) and copy.score_after == 0.75
    assert (copy.tags["gate"], copy.tags["copied_from"]) == ("passed", "models:/sorter/2")
    assert mlflow_client(sqlite_uri).get_model_version("production", "1").tags["team"] == "ours"
    mlflow_client(sqlite_uri).delete_model_version("sorter", "2")
    assert contents(production.download("1", tmp_path / "model")) == contents(tmp_path / "export")
    assert not (tmp_path / "cache").exists()  # nothing was moved
    with pytest.raises(InputError, match="sorter itself"):
        copy_version(source, "1", "sorter", None, tmp_path / "cache")


def test_a_copy_to_a_server_and_within_it(server: Any, sqlite_uri: str, tmp_path: Path) -> None:
    own = f"sqlite:///{tmp_path}/own.db"
    source = registry_with(own, tmp_path, {"parent": "models:/sorter/9"})
    for _ in range(2):
        assert copy_version(source, "1", "sorter", server.uri, tmp_path / "cache") == "1"
    far = Registry(server.uri, "sorter")
    (copy,) = far.versions()
    assert copy.tags["copied_from_uri"] == own and copy.tags["parent"] == "models:/sorter/9" and copy.run == "my-run"
    assert contents(far.download("1", tmp_path / "model")) == contents(tmp_path / "export")
    for _ in range(2):
        assert copy_version(far, "1", "production", None, tmp_path / "cache") == "1"
    production = Registry(server.uri, "production")
    assert contents(production.download("1", tmp_path / "again")) == contents(tmp_path / "export")
    assert production.get("1").tags["copied_from"] == "models:/sorter/1"
