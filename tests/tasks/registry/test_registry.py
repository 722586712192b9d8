import multiprocessing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support_registry import SCORES, contents, make_run, model_folder, register

from rl_core.errors import InputError
from tasks.registry.registry import Registry, model_names
from tasks.tracking.tracker import mlflow_client


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


def test_the_candidate_is_the_last_one_registered(sqlite_uri: str, tmp_path: Path) -> None:
    folder, run_id = model_folder(tmp_path / "export"), make_run(sqlite_uri, tmp_path)
    registry = Registry(sqlite_uri, "sorter")
    for checkpoint, candidate in (("aaa", "1"), ("bbb", "2"), ("aaa", "2")):
        registry.set_candidate(register(sqlite_uri, run_id, folder, checkpoint))
        assert registry.aliases() == {"candidate": candidate}


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

    def together(self: Registry, *args: object) -> None:
        barrier.wait(60)  # type: ignore[attr-defined]
        create(self, *args)  # type: ignore[arg-type]

    Registry._create = together  # type: ignore[method-assign, assignment]
    queue.put(register(uri, run_id, folder, "aaa"))  # type: ignore[attr-defined]


def test_two_processes_leave_one_version(sqlite_uri: str, tmp_path: Path) -> None:
    folder, run_id = model_folder(tmp_path / "export"), make_run(sqlite_uri, tmp_path)
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    processes = [context.Process(target=race, args=(sqlite_uri, run_id, folder, barrier, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    answers = {queue.get(timeout=600) for _ in processes}
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    registry = Registry(sqlite_uri, "sorter")
    assert [v.version for v in registry.versions()] == ["1"] and answers == {"1"}
    assert contents(registry.download("1", tmp_path / "model")) == contents(folder)


def test_the_same_through_a_server(server: Any, tmp_path: Path) -> None:
    folder, run_id = model_folder(tmp_path / "export"), make_run(server.uri, None)
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


def test_models_of_all_pages_are_listed(sqlite_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = mlflow_client(sqlite_uri)
    for name in "ba":
        client.create_registered_model(name)
    search = partial(client.search_registered_models, max_results=1)
    monkeypatch.setattr(client, "search_registered_models", search)
    monkeypatch.setattr("tasks.registry.registry.mlflow_client", lambda _: client)
    assert model_names(sqlite_uri) == ["a", "b"]
