"""Low-rank adapters: what trains, what the reference is, and what is saved and exported."""

from pathlib import Path

import peft
import pytest
import torch
from support import (
    LENGTHS,
    off_policy,
    plain_log_probs,
    plain_outputs,
    policy_engine,
    rows_of,
    save,
    update_alone,
    weights_of,
)
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from rl_core.config.schema import FSDPConfig, LoraConfig, OptimConfig
from rl_core.data.protocol import DataProto
from rl_core.errors import InputError
from rl_core.models.load import empty_causal_lm
from rl_core.models.lora import adapters_off, add_adapters
from rl_core.storage.store import Store
from rl_core.training.engine import TrainEngine
from rl_core.training.mesh import RankMesh
from rl_core.training.sharded_checkpoint import export_model, load_engine

OPTIM = OptimConfig(lr=3e-2, grad_clip=1e9)
LORA = LoraConfig(rank=4, alpha=8)


def adapted(model: Path, rank_mesh: RankMesh, lora: LoraConfig = LORA, **more: FSDPConfig) -> TrainEngine:
    return policy_engine(model, rank_mesh, OPTIM, lora=lora, **more)  # type: ignore[arg-type]


def trained(model: Path, rank_mesh: RankMesh, lora: LoraConfig = LORA) -> tuple[TrainEngine, DataProto]:
    """An engine whose adapters clearly act, and rows."""
    engine = adapted(model, rank_mesh, lora)
    rows = off_policy(engine, rows_of(LENGTHS))
    update_alone(engine, rows)
    update_alone(engine, rows)
    return engine, rows


def test_only_adapters_change(tiny_model: Path, rank_mesh: RankMesh) -> None:
    engine = adapted(tiny_model, rank_mesh)
    start = {name: tensor.clone() for name, tensor in engine.adapter_parameters()}
    rows = off_policy(engine, rows_of(LENGTHS))
    update_alone(engine, rows)
    update_alone(engine, rows)
    end = dict(engine.adapter_parameters())
    assert len(end) == 2 * 7 and not any(torch.equal(start[name], end[name]) for name in end)
    saved = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
    base = dict(engine.full_parameters(merged=False))
    assert base.keys() == saved.keys() and all(torch.equal(base[name], saved[name]) for name in saved)
    assert all(tensor.grad is None for name, tensor in engine.module.named_parameters() if "lora_" not in name)


def test_training_starts_at_the_base_and_the_reference_stays_there(tiny_model: Path, rank_mesh: RankMesh) -> None:
    engine, rows = adapted(tiny_model, rank_mesh), rows_of(LENGTHS)
    wanted = policy_engine(tiny_model, rank_mesh).compute(rows, 0.7)[0]
    # The reference comes first: that it was off when the weights were first gathered must not stop training.
    with adapters_off(engine.model):
        assert torch.equal(engine.compute(rows, 0.7)[0], wanted)
    assert torch.equal(engine.compute(rows, 0.7)[0], wanted)
    for _ in range(2):
        metrics = update_alone(engine, off_policy(engine, rows))
    assert metrics["grad_norm"] > 0
    assert (engine.compute(rows, 0.7)[0] - wanted).abs().max() > 0.1
    with adapters_off(engine.model):
        assert torch.equal(engine.compute(rows, 0.7)[0], wanted)
    assert (engine.compute(rows, 0.7)[0] - wanted).abs().max() > 0.1


def test_on_policy_the_kl_is_zero(tiny_model: Path, rank_mesh: RankMesh) -> None:
    engine, rows = trained(tiny_model, rank_mesh)
    rows.batch["old_log_probs"] = engine.compute(rows, 1.0)[0]
    metrics = update_alone(engine, rows)
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6) and metrics["clip_frac"] == 0


def test_recomputed_layers_give_the_same_gradient(tiny_model: Path, rank_mesh: RankMesh) -> None:
    moments = []
    for config in (FSDPConfig(), FSDPConfig(activation_checkpointing=True)):
        engine = adapted(tiny_model, rank_mesh, config=config)
        rows = off_policy(engine, rows_of(LENGTHS))
        update_alone(engine, rows)
        moments.append(weights_of(engine))
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in moments[0])
    assert any(tensor.any() for name, tensor in moments[0].items() if name.startswith("exp_avg."))


@pytest.mark.parametrize("targets", [("q_proj", "down_proj"), ("all-linear",)])
def test_export_merged_and_as_adapter(
    tiny_model: Path, rank_mesh: RankMesh, tmp_path: Path, targets: tuple[str, ...]
) -> None:
    engine, rows = trained(tiny_model, rank_mesh, LoraConfig(rank=4, alpha=8, target_modules=targets))
    export_model(engine, "float32", tiny_model, Store(str(tmp_path)), "export")
    seen_BR = engine.compute(rows, 1.0)[0]
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    assert sorted(file.name for file in (tmp_path / "export/adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    with_adapter = peft.PeftModel.from_pretrained(base, tmp_path / "export/adapter")
    assert not any("base_layer" in name or "lora" in name for name in engine_names(tmp_path / "export"))
    moved = 0.0
    for i, (p, r) in enumerate(LENGTHS):
        prompt, response = rows.batch["prompts"][i, :p].tolist(), rows.batch["responses"][i, :r].tolist()
        merged = plain_log_probs(tmp_path / "export", prompt, response)
        adapter = plain_outputs(with_adapter, prompt, response, 1.0)[0]  # type: ignore[arg-type]
        torch.testing.assert_close(merged, seen_BR[i, :r], rtol=0, atol=1e-5)
        torch.testing.assert_close(adapter, seen_BR[i, :r], rtol=0, atol=1e-5)
        moved = max(moved, (merged - plain_log_probs(tiny_model, prompt, response)).abs().max().item())
    assert moved > 0.1


def engine_names(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return list(file.keys())


def test_training_goes_on_from_an_export(tiny_model: Path, rank_mesh: RankMesh, tmp_path: Path) -> None:
    engine, rows = trained(tiny_model, rank_mesh)
    export_model(engine, "float32", tiny_model, Store(str(tmp_path)), "export")
    again = adapted(tmp_path / "export", rank_mesh)
    torch.testing.assert_close(again.compute(rows, 1.0)[0], engine.compute(rows, 1.0)[0], rtol=0, atol=1e-5)
    export_model(again, "float32", tmp_path / "export", Store(str(tmp_path)), "second")
    assert (tmp_path / "second/tokenizer.json").is_file()


def test_a_fresh_engine_continues_a_checkpoint_of_adapters_bit_for_bit(
    tiny_model: Path, rank_mesh: RankMesh, tmp_path: Path
) -> None:
    engine, rows = trained(tiny_model, rank_mesh)
    store = Store(str(tmp_path))
    save(engine, store, "step")
    kept = FileSystemReader(tmp_path / "step").read_metadata().state_dict_metadata
    assert len(kept) == 1 + 3 * 14 and all(name == "counts" or ".lora_" in name for name in kept)
    metrics = update_alone(engine, rows)
    resumed = policy_engine(tiny_model, rank_mesh, OPTIM, lora=LORA)
    load_engine(resumed, store, "step")
    assert resumed.updates == 2 and update_alone(resumed, rows) == metrics
    wanted, seen = weights_of(engine), weights_of(resumed)
    assert all(torch.equal(seen[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    "targets", [("q_porj",), ("lm_head",), ("embed_tokens",), ("q_proj", "qkv_proj"), ("proj",), ()]
)
def test_targets_that_are_no_linear_layers_are_refused(tiny_model: Path, targets: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="down_proj,gate_proj,k_proj,o_proj,q_proj,up_proj,v_proj") as caught:
        add_adapters(empty_causal_lm(tiny_model), LoraConfig(rank=4, target_modules=targets))
    assert caught.value.seen == (targets[-1] if targets else "none")


def test_the_seed_draws_the_adapters(tiny_model: Path, rank_mesh: RankMesh) -> None:
    def drawn(seed: int) -> dict[str, Tensor]:
        from rl_core.models.load import PolicyModel

        policy = PolicyModel(add_adapters(empty_causal_lm(tiny_model), LORA))
        engine = TrainEngine(policy, tiny_model, rank_mesh, FSDPConfig(), "float32", None, 0, 4096, seed)
        return dict(engine.adapter_parameters())

    first, same, other = drawn(1), drawn(1), drawn(2)
    for name, tensor in first.items():
        assert torch.equal(tensor, same[name])
        assert torch.equal(tensor, other[name]) == ("lora_B" in name) == (not tensor.any())
