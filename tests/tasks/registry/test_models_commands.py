"""Commands on registered models in this process; what they print is held to docs/registry.md elsewhere."""

import json
from pathlib import Path

import pytest
from support_registry import registry_with

from flows.cli.main import main
from tasks.registry.registry import Registry


@pytest.fixture
def registry(sqlite_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setenv("ROLLFORWARD_HOME", str(tmp_path))
    return registry_with(sqlite_uri, tmp_path, {"run": "\x1b[31mred"}, {"gate": "refused"})


def test_force_and_rollback_move_the_champion(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["promote", "1"]) == 0 and main(["promote", "2"]) == 2 and registry.aliases() == {"champion": "1"}
    assert main(["promote", "2", "--force"]) == 0 and registry.aliases() == {"champion": "2", "previous": "1"}
    assert main(["rollback"]) == 0 and registry.aliases() == {"champion": "1", "previous": "2"}
    capsys.readouterr()
    assert main(["models"]) == 0
    said = capsys.readouterr().out
    assert "gate refused  forced 2" in said and "rolled back 2" in said and "champion  since 2" in said
    assert "\x1b" not in said


def test_lineage_as_json_has_each_version_of_a_hash(registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    registry.set_tags("1", {"data_hash": "d" * 64})
    registry.set_tags("2", {"data_hash": "d" * 64})
    assert main(["lineage", "d" * 64, "--json"]) == 0
    assert [facts["version"] for facts in json.loads(capsys.readouterr().out)] == ["2", "1"]
    assert main(["lineage", "nobody"]) == 2


def test_copy_reaches_another_file(registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = f"sqlite:///{tmp_path}/other/mlflow.db"
    assert main(["copy", "2", "--to", "production", "--to-uri", uri]) == 0
    assert f"version 1 of production in {uri}" in capsys.readouterr().out
    assert Registry(uri, "production").get("1").tags["gate"] == "refused"
    assert main(["copy", "2", "--to", "production", "--to-uri", "ftp://x"]) == 2


def test_words_after_two_dashes_are_for_serve_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["models", "--", "--max-model-len", "64"])
    assert "unrecognized arguments: -- --max-model-len 64" in capsys.readouterr().err
