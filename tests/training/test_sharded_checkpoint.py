import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support import LENGTHS, off_policy, policy_engine, rows_of, save, update_alone, weights_of
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoModelForCausalLM, GenerationConfig

from rl_core.config.schema import OptimConfig
from rl_core.errors import RollforwardError
from rl_core.models.load import check_model_folder, load_tokenizer, stop_tokens
from rl_core.storage.store import Store
from rl_core.training import sharded_checkpoint as checkpoint
from rl_core.training.mesh import RankMesh
from rl_core.training.sharded_checkpoint import FILES, export_model, load_engine

OPTIM = OptimConfig(lr=1e-3, lr_schedule="linear", warmup_steps=1, weight_decay=0.1)


@pytest.fixture(params=["folder", "remote"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(str(tmp_path) if request.param == "folder" else f"memory://{uuid.uuid4().hex}")


@pytest.mark.parametrize("steps", [0, 2])
def test_a_fresh_engine_continues_bit_for_bit(tiny_model: Path, rank_mesh: RankMesh, store: Store, steps: int) -> None:
    engine = policy_engine(tiny_model, rank_mesh, OPTIM)
    rows = off_policy(engine, rows_of(LENGTHS))
    for _ in range(steps):
        update_alone(engine, rows)
    save(engine, store, "step")
    metrics = [update_alone(engine, rows) for _ in range(2)]
    resumed = policy_engine(tiny_model, rank_mesh, OPTIM)
    load_engine(resumed, store, "step")
    assert resumed.updates == steps
    assert [update_alone(resumed, rows) for _ in range(2)] == metrics
    wanted, seen = weights_of(engine), weights_of(resumed)
    assert all(torch.equal(seen[name], wanted[name]) for name in wanted)


def test_a_used_engine_goes_back_to_the_start(tiny_model: Path, rank_mesh: RankMesh, tmp_path: Path) -> None:
    engine = policy_engine(tiny_model, rank_mesh, OPTIM)
    rows = off_policy(engine, rows_of(LENGTHS))
    save(engine, Store(str(tmp_path)), "start")
    first = update_alone(engine, rows), weights_of(engine)
    update_alone(engine, rows)
    load_engine(engine, Store(str(tmp_path)), "start")
    again = update_alone(engine, rows), weights_of(engine)
    assert again[0] == first[0]
    assert all(torch.equal(again[1][name], first[1][name]) for name in first[1])


def test_every_folder_of_a_checkpoint_is_flushed_to_disk(
    tiny_model: Path, rank_mesh: RankMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, real = set(), os.fsync

    def fsync(descriptor: int) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    store = Store(str(tmp_path / "run"))
    save(policy_engine(tiny_model, rank_mesh, OPTIM), store, "checkpoints/step_000001/actor")
    store.commit_folder("checkpoints/step_000001", {})
    for folder in ("", "run", "run/checkpoints", "run/checkpoints/step_000001", "run/checkpoints/step_000001/actor"):
        assert str(tmp_path / folder) in flushed, "the names in this folder may be lost"


def test_the_list_of_files_comes_when_all_shards_are_there(
    tiny_model: Path, rank_mesh: RankMesh, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit may rely on it when ranks no longer answer."""
    listed, gather = f"step/{FILES}", dist.gather_object
    there: list[bool] = []

    def gathered(*args: Any, **options: Any) -> None:
        there.append(store.exists(listed))
        gather(*args, **options)

    monkeypatch.setattr(dist, "gather_object", gathered)
    save(policy_engine(tiny_model, rank_mesh, OPTIM), store, "step")
    names = [file["path"].rpartition("/")[2] for file in store.read_json(listed)]
    assert there and not any(there) and {*names, FILES} == {*store.listdir("step")}


@pytest.mark.parametrize(("room", "kind"), [(0, "InputError"), (1 << 40, "TransientError")])
def test_an_archive_that_is_cut_is_a_full_disk_or_worth_a_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, kind: str
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=room))
    cut = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    with pytest.raises(RollforwardError) as raised, checkpoint._real_cause(str(tmp_path), writing=True):
        raise CheckpointException("write", {0: (cut, None)})  # type: ignore[dict-item]
    assert type(raised.value).__name__ == kind


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_is_an_ordinary_folder(
    tiny_model: Path, rank_mesh: RankMesh, store: Store, tmp_path: Path, dtype: str
) -> None:
    engine = policy_engine(tiny_model, rank_mesh, OPTIM)
    rows = off_policy(engine, rows_of(LENGTHS))
    update_alone(engine, rows)
    update_alone(engine, rows)
    store.write_bytes("export/left_over.txt", b"of an earlier attempt")
    export_model(engine, dtype, tiny_model, store, "export")
    folder = tmp_path / "copy"
    store.download("export", folder)
    assert not (folder / "left_over.txt").exists()
    check_model_folder(str(folder))
    assert load_tokenizer(folder).chat_template == load_tokenizer(tiny_model).chat_template
    assert stop_tokens(folder) == stop_tokens(tiny_model)
    kind = getattr(torch, dtype)
    saved = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in saved and {tensor.dtype for tensor in saved.values()} == {kind}
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == kind and model.config.architectures == ["Qwen3ForCausalLM"]
    for name, tensor in engine.full_parameters():
        assert torch.equal(model.state_dict()[name], tensor.to(kind)), name


def with_extras(model: Path, folder: Path) -> Path:
    """A copy of the model with what folders from elsewhere have beside the weights."""
    shutil.copytree(model, folder)
    generation = {"eos_token_id": [2, 5], "temperature": 0.6, "top_p": 0.9}  # not with do_sample, as it often is
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ messages }}")
    for name in ("pytorch_model.bin", "consolidated.00.pth", "manifest.json"):
        (folder / name).write_text("of the old weights")
    return folder


def test_what_lies_beside_the_weights_goes_along(tiny_model: Path, rank_mesh: RankMesh, tmp_path: Path) -> None:
    source = with_extras(tiny_model, tmp_path / "source")
    engine = policy_engine(source, rank_mesh)
    export_model(engine, "float32", source, Store(str(tmp_path)), "export")
    export = tmp_path / "export"
    kept = ["chat_template.jinja", "special_tokens_map.json", "additional_chat_templates/tool_use.jinja"]
    for name in [*kept, "tokenizer.json", "tokenizer_config.json"]:
        assert (export / name).read_bytes() == (source / name).read_bytes(), name
    assert {file.name for file in export.iterdir()} == {
        "additional_chat_templates", "chat_template.jinja", "config.json", "generation_config.json",
        "model.safetensors", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    generation = GenerationConfig.from_pretrained(export)
    assert (generation.eos_token_id, generation.temperature, generation.top_p) == ([2, 5], 0.6, 0.9)
    assert stop_tokens(export) == (2, 5)


def test_a_generation_config_that_only_the_model_has_goes_along(
    tiny_model: Path, rank_mesh: RankMesh, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_model, source)
    (source / "generation_config.json").unlink()
    engine = policy_engine(source, rank_mesh)
    engine.model.generation_config = GenerationConfig(eos_token_id=[2, 7], do_sample=True, temperature=0.8)
    export_model(engine, "float32", source, Store(str(tmp_path)), "export")
    generation = AutoModelForCausalLM.from_pretrained(tmp_path / "export").generation_config
    assert (generation.eos_token_id, generation.temperature) == ([2, 7], 0.8)
    assert engine.model.generation_config.temperature == 0.8, "the model in training lost its own"
