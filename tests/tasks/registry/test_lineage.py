import shutil
from pathlib import Path

import pytest
from support_registry import DATA, checkpoint, registry_with, run_in_store

from rl_core.errors import InputError
from tasks.registry.lineage import find_versions, lineage
from tasks.registry.registry import Registry


@pytest.fixture
def registry(sqlite_uri: str, tmp_path: Path) -> Registry:
    """Version 2 was trained from version 1, that from a folder; the run of version 2 is still there."""
    run_in_store(str(tmp_path / "run"), 12)
    first = {"run": "first", "parent": "/models/Base", "parent_hash": "b" * 64, "data_hash": "e" * 64}
    second = {"parent": "models:/sorter/1", "store": str(tmp_path / "run"), "gate": "passed", "data_hash": DATA}
    return registry_with(sqlite_uri, tmp_path, first, second)


def test_a_version_leads_to_its_run_rows_evaluation_decision_and_ancestors(registry: Registry) -> None:
    registry.promote("1")
    registry.promote("2")
    facts = lineage(registry, "champion")
    assert facts["missing"] == [] and facts["version"] == "2"
    assert facts["parents"] == [
        {"name": "models:/sorter/1", "run": "first", "step": 12, "score": 0.75},
        {"name": "/models/Base", "hash": "b" * 64},
    ]
    assert facts["run"]["config"] == {"trainer": {"steps": 12}} and facts["data"]["files"] == {"rows.jsonl": DATA[:16]}
    assert [facts["evaluation"][when]["greedy"] for when in ("before", "after")] == [0.25, 0.75]
    assert facts["decision"]["promote"] is True and facts["rollouts"]["steps"] == 12
    assert [move["why"] for move in facts["moves"]] == ["promoted"] and facts["tags"]["gate"] == "passed"
    earlier = lineage(registry, "1")
    assert earlier["children"] == ["models:/sorter/2"] and len(earlier["moves"]) == 2
    assert earlier["missing"] == ["the version has no tag with the location of its run"] and earlier["run"] is None


def test_what_has_gone_is_named(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "run" / "evaluation" / "decision.json").unlink()
    (tmp_path / "run" / "run.json").write_text("{broken")
    assert [text.partition(" cannot be read")[0] for text in lineage(registry, "2")["missing"]] == [
        f"{tmp_path}/run/run.json"
    ]
    run_in_store(str(tmp_path / "run"), 12)
    (tmp_path / "run" / "evaluation" / "decision.json").unlink()
    assert lineage(registry, "2")["missing"] == [f"{tmp_path}/run/evaluation/decision.json does not exist"]
    shutil.rmtree(tmp_path / "run")
    registry._client.delete_model_version("sorter", "1")
    facts = lineage(registry, "2")
    assert facts["missing"] == [
        f"{tmp_path}/run/run.json does not exist",
        "models:/sorter/1, the parent, is no longer registered",
    ]
    assert facts["data"] is None and facts["parents"][0]["name"] == "models:/sorter/1"


def test_runs_and_hashes_lead_back_to_versions(registry: Registry) -> None:
    def found(word: str) -> list[str]:
        return [info.version for info in find_versions(registry, word)]

    assert found("my-run") == ["2"] and found("first") == ["1"]
    assert found("e" * 64) == ["1"] and found(DATA[:12]) == ["2"] and found(checkpoint(1)[:8]) == ["1"]
    assert found("2") == ["2"]
    registry.set_tags("1", {"also.again": "12"})
    assert found("again") == ["1"]
    for word in (DATA[:7], "nobody", ""):
        with pytest.raises(InputError, match="version 2, version 1"):
            found(word)


def test_a_circle_of_parents_ends(registry: Registry) -> None:
    registry.set_tags("1", {"parent": "models:/sorter/2"})
    assert [each["name"] for each in lineage(registry, "2")["parents"]] == ["models:/sorter/1", "models:/sorter/2"]
