"""Checkpoints are read without running anything that is in them, however consistent their manifests are."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import policy_engine, save
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from rl_core.config.schema import OptimConfig
from rl_core.errors import InputError
from rl_core.storage.store import Store
from rl_core.training.checkpoint_reader import METADATA
from rl_core.training.engine import TrainEngine
from rl_core.training.mesh import RankMesh
from rl_core.training.sharded_checkpoint import load_engine


class Planted:
    """Touches a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@pytest.fixture
def engine(tiny_model: Path, rank_mesh: RankMesh) -> TrainEngine:
    return policy_engine(tiny_model, rank_mesh, OptimConfig())


@pytest.fixture
def saved(engine: TrainEngine, tmp_path: Path) -> Path:
    save(engine, Store(str(tmp_path)), "step/actor")
    return tmp_path / "step/actor"


def refused(engine: TrainEngine, folder: Path, words: str) -> None:
    """Commits the folder as it is, and sees that it is not loaded."""
    store = Store(str(folder.parents[1]))
    store.commit_folder("step", {})
    assert store.verify("step") == []
    with pytest.raises(InputError, match=words) as caught:
        load_engine(engine, store, "step/actor")
    assert str(folder) in caught.value.where


def test_a_function_in_the_table_is_not_called(engine: TrainEngine, saved: Path, tmp_path: Path) -> None:
    planted = pickle.dumps(Planted(tmp_path / "ran"))
    pickle.loads(planted)
    assert (tmp_path / "ran").exists(), "the plant does not work"
    (tmp_path / "ran").unlink()
    (saved / METADATA).write_bytes(planted)
    refused(engine, saved, "it references posix.system")
    assert not (tmp_path / "ran").exists()


def test_a_function_inside_a_right_table_is_not_called(engine: TrainEngine, saved: Path, tmp_path: Path) -> None:
    table: Metadata = FileSystemReader(saved).read_metadata()
    table.planner_data = Planted(tmp_path / "ran")
    (saved / METADATA).write_bytes(pickle.dumps(table))
    refused(engine, saved, "it references posix.system")
    assert not (tmp_path / "ran").exists()


def test_an_object_instead_of_a_tensor_is_not_unpickled(engine: TrainEngine, saved: Path, tmp_path: Path) -> None:
    table: Metadata = FileSystemReader(saved).read_metadata()
    (index,) = [index for index in table.storage_data if index.fqn == "counts"]
    table.state_dict_metadata["counts"] = BytesStorageMetadata()
    entry = table.storage_data.pop(index)
    table.storage_data[type(index)("counts")] = entry
    shard = saved / entry.relative_path
    start = shard.stat().st_size
    with shard.open("ab") as file:
        torch.save(Planted(tmp_path / "ran"), file)
    entry.offset, entry.length = start, shard.stat().st_size - start
    (saved / METADATA).write_bytes(pickle.dumps(table))
    dcp.load(engine.state(), checkpoint_id=saved)
    assert (tmp_path / "ran").exists(), "torch alone does not run it either"
    (tmp_path / "ran").unlink()
    refused(engine, saved, "it references torch.distributed.checkpoint.metadata.BytesStorageMetadata")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("path", ["../other/__0_0.distcp", "/etc/passwd"])
def test_shards_elsewhere_are_not_read(engine: TrainEngine, saved: Path, path: str) -> None:
    table: Metadata = FileSystemReader(saved).read_metadata()
    next(iter(table.storage_data.values())).relative_path = path
    (saved / METADATA).write_bytes(pickle.dumps(table))
    refused(engine, saved, "is not a file in this folder")


@pytest.mark.parametrize("text", [b"", b"cut", pickle.dumps([1, 2])], ids=["empty", "cut", "other"])
def test_a_table_that_is_none_is_named(engine: TrainEngine, saved: Path, text: bytes) -> None:
    (saved / METADATA).write_bytes(text)
    refused(engine, saved, "tensors and a table of them")
