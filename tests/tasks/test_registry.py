import multiprocessing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rl_core.errors import InputError
from tasks.registry import Registry, VersionInfo, decide
from tasks.tracking import Tracker, mlflow_client

SCORES = {"score_before": 0.25, "score_after": 0.75}


def model_folder(path: Path) -> Path:
    (path / "sub").mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "qwen3"}')
    (path / "sub" / "chat_template.jinja").write_text("{{ messages }}")
    save_file({"w": torch.arange(12.0)}, path / "model.safetensors")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def make_run(uri: str, root: Path) -> str:
    return Tracker(uri, "exp", "my-run", "key1", root / "artifacts of home").run_id


def register(uri: str, run_id: str, folder: Path, checkpoint: str) -> str:
    tags = {"run": "my-run", "step": "12", "config_hash": "c", "data_hash": "d"}
    return Registry(uri, "sorter").register(folder, run_id, checkpoint, tags, SCORES)


def test_same_checkpoint_gives_one_version(sqlite_uri: str, tmp_path: Path) -> None:
    folder, run_id = model_folder(tmp_path / "export"), make_run(sqlite_uri, tmp_path)
    assert register(sqlite_uri, run_id, folder, "aaa") == "1"
    assert register(sqlite_uri, run_id, folder, "aaa") == "1"
    assert register(sqlite_uri, run_id, folder, "bbb") == "2"
    registry = Registry(sqlite_uri, "sorter")
    assert [v.version for v in registry.versions()] == ["2", "1"]
    info = registry.get("1")
    assert (info.step, info.run, info.score_before, info.score_after) == (12, "my-run", 0.25, 0.75)
    assert info.checkpoint == "aaa" and abs((datetime.now(UTC) - info.created).total_seconds()) < 60
    client = mlflow_client(sqlite_uri)
    assert client.get_model_version("sorter", "1").tags["rollforward.data_hash"] == "d"
    assert client.get_run(run_id).data.metrics == SCORES
    assert len(client.get_metric_history(run_id, "score_after")) == 1


def test_download_gives_back_the_same_bytes(sqlite_uri: str, tmp_path: Path) -> None:
    folder, run_id = model_folder(tmp_path / "export"), make_run(sqlite_uri, tmp_path)
    registry = Registry(sqlite_uri, "sorter")
    registry.set_alias("champion", register(sqlite_uri, run_id, folder, "aaa"))
    target = tmp_path / "new" / "model"
    assert registry.download("champion", target) == target
    assert contents(target) == contents(folder)
    assert [p.name for p in target.parent.iterdir()] == ["model"]
    with pytest.raises(InputError, match="new or empty"):
        registry.download("1", target)
    (tmp_path / "empty").mkdir()
    assert contents(registry.download("1", tmp_path / "empty")) == contents(folder)


def test_aliases_move_and_are_strings(sqlite_uri: str, tmp_path: Path) -> None:
    registry = Registry(sqlite_uri, "sorter")
    assert registry.aliases() == {} and registry.versions() == []
    folder, run_id = model_folder(tmp_path / "export"), make_run(sqlite_uri, tmp_path)
    for checkpoint in ("aaa", "bbb"):
        registry.set_alias("candidate", register(sqlite_uri, run_id, folder, checkpoint))
    assert registry.aliases() == {"candidate": "2"}
    assert registry.promote("1") == (None, "1")
    assert registry.promote("candidate") == ("1", "2")
    assert registry.promote("2") == ("2", "2")
    assert registry.aliases() == {"candidate": "2", "champion": "2", "previous": "1"}
    assert registry.get("champion").aliases == ("candidate", "champion")


def test_wrong_names_are_explained(sqlite_uri: str, tmp_path: Path) -> None:
    registry = Registry(sqlite_uri, "sorter")
    with pytest.raises(InputError, match="no version of this model"):
        registry.get("champion")
    folder, run_id = model_folder(tmp_path / "export"), make_run(sqlite_uri, tmp_path)
    registry.set_alias("candidate", register(sqlite_uri, run_id, folder, "aaa"))
    with pytest.raises(InputError, match="version 1 = candidate"):
        registry.get("champion")
    with pytest.raises(InputError, match="(?s)reserved.*MLflow at"):
        registry.set_alias("latest", "1")
    with pytest.raises(InputError, match="no such folder"):
        register(sqlite_uri, run_id, tmp_path / "nowhere", "ccc")


def race(uri: str, run_id: str, folder: Path, barrier: object, queue: object) -> None:
    create = Registry._create

    def together(self: Registry, *args: object) -> str:
        barrier.wait(60)  # type: ignore[attr-defined]
        return create(self, *args)  # type: ignore[arg-type]

    Registry._create = together  # type: ignore[method-assign, assignment]
    queue.put(register(uri, run_id, folder, "aaa"))  # type: ignore[attr-defined]


@pytest.mark.timeout(120)
def test_two_processes_leave_one_version(sqlite_uri: str, tmp_path: Path) -> None:
    folder, run_id = model_folder(tmp_path / "export"), make_run(sqlite_uri, tmp_path)
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    processes = [context.Process(target=race, args=(sqlite_uri, run_id, folder, barrier, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    answers = {queue.get(timeout=100) for _ in processes}
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    registry = Registry(sqlite_uri, "sorter")
    assert [v.version for v in registry.versions()] == ["1"] and answers == {"1"}
    assert contents(registry.download("1", tmp_path / "model")) == contents(folder)


@pytest.mark.timeout(120)
def test_the_same_through_a_server(server: Any, tmp_path: Path) -> None:
    folder, run_id = model_folder(tmp_path / "export"), Tracker(server.uri, "exp", "my-run", "key1", None).run_id
    registry = Registry(server.uri, "sorter")
    assert registry.aliases() == {} and registry.versions() == []
    assert [register(server.uri, run_id, folder, checkpoint) for checkpoint in ("aaa", "aaa", "bbb")] == ["1", "1", "2"]
    registry.set_alias("candidate", "2")
    assert registry.promote("1") == (None, "1") and registry.promote("candidate") == ("1", "2")
    assert registry.aliases() == {"candidate": "2", "champion": "2", "previous": "1"}
    assert [(v.version, v.score_after) for v in registry.versions()] == [("2", 0.75), ("1", 0.75)]
    assert contents(registry.download("champion", tmp_path / "model")) == contents(folder)
    with pytest.raises(InputError, match="version 2 = candidate = champion, version 1 = previous"):
        registry.get("7")


def test_decision() -> None:
    champion = VersionInfo("1", ("champion",), 1, "r", 0.1, 0.8, datetime.now(UTC), "aaa")
    candidate = replace(champion, version="2", aliases=(), checkpoint="bbb")
    assert decide(candidate, None, 0.8) == (True, "score 0.800 and there is no champion yet")
    assert decide(candidate, None, 0.81)[0] is False
    assert decide(candidate, champion, 0.0)[0] is True
    assert decide(replace(candidate, score_after=0.79), champion, 0.0) == (
        False, "score 0.790 against 0.800 of the champion, version 1"
    )  # fmt: skip
    assert decide(replace(candidate, score_after=None), None, 0.0)[0] is False
    assert decide(candidate, replace(champion, score_after=None), 0.0)[0] is True
    assert decide(champion, champion, 0.0)[0] is True
