from pathlib import Path
from typing import Any

import pytest
import torch
from support import LENGTHS, distance, off_policy, plain_log_probs, policy_engine, rows_of, update_alone, weights_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_core.config.schema import ActorConfig, CriticConfig, FSDPConfig, OptimConfig
from rl_core.data.protocol import DataProto
from rl_core.errors import TrainingError
from rl_core.models.load import ValueModel, empty_causal_lm
from rl_core.training.engine import TrainEngine
from rl_core.training.losses import supervised_loss, value_loss
from rl_core.training.mesh import RankMesh

SMALLEST = max(p + r for p, r in LENGTHS)
# No clipping, which would hide a gradient of the wrong size.
OPTIM = OptimConfig(lr=1e-3, grad_clip=1e9)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_compute_gives_the_log_probs_of_the_plain_model(
    tiny_model: Path, rank_mesh: RankMesh, temperature: float
) -> None:
    rows = rows_of(LENGTHS)
    engine = policy_engine(tiny_model, rank_mesh, max_tokens=SMALLEST)
    log_probs_BR, entropy_BR, _ = engine.compute(rows, temperature)
    assert log_probs_BR.shape == entropy_BR.shape == rows.batch["responses"].shape
    for i, (p, r) in enumerate(LENGTHS):
        prompt, response = rows.batch["prompts"][i, :p].tolist(), rows.batch["responses"][i, :r].tolist()
        wanted = plain_log_probs(tiny_model, prompt, response, temperature)
        torch.testing.assert_close(log_probs_BR[i, :r], wanted, rtol=0, atol=5e-6)
        assert not log_probs_BR[i, r:].any() and not entropy_BR[i, r:].any()


def test_on_policy_the_ratio_is_one(tiny_model: Path, rank_mesh: RankMesh) -> None:
    rows = rows_of(LENGTHS)
    engine = policy_engine(tiny_model, rank_mesh, OPTIM, max_tokens=2 * SMALLEST)
    old_BR = engine.compute(rows, 0.7)[0]
    assert torch.equal(engine.compute(rows, 0.7)[0], old_BR)
    trained: list[tuple[DataProto, Tensor]] = []

    def loss_function(outputs: tuple[Tensor, ...], micro: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        trained.append((micro, outputs[0].detach()))
        return outputs[0].sum(), {}

    engine.train_mini_batch(rows.union(DataProto({"old": old_BR})), loss_function, 0.7)
    assert len(trained) > 1 and sum(len(micro) for micro, _ in trained) == len(rows)
    for micro, log_prob_BR in trained:
        ratio_BR = (log_prob_BR - micro.batch["old"]).exp()
        torch.testing.assert_close(ratio_BR, torch.ones_like(ratio_BR), rtol=0, atol=1e-6)


def test_metrics_on_policy(tiny_model: Path, rank_mesh: RankMesh) -> None:
    rows = rows_of(LENGTHS)
    engine = policy_engine(tiny_model, rank_mesh, OPTIM, max_tokens=SMALLEST)
    old_BR, entropy_BR, _ = engine.compute(rows, 1.0)
    metrics = update_alone(engine, rows.union(DataProto({"old_log_probs": old_BR})))
    mask_BR = rows.batch["response_mask"]
    assert metrics["clip_frac"] == metrics["dual_clip_frac"] == 0
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["entropy"] == pytest.approx(((entropy_BR * mask_BR).sum() / mask_BR.sum()).item(), rel=1e-5)
    wanted = -(rows.batch["advantages"] * mask_BR).sum() / mask_BR.sum()
    assert metrics["loss"] == metrics["pg_loss"] == pytest.approx(wanted.item(), rel=1e-5)
    assert metrics["grad_norm"] > 0 and metrics["lr"] == 1e-3


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_micro_batches_change_neither_gradient_nor_weights(tiny_model: Path, rank_mesh: RankMesh, mode: str) -> None:
    config = ActorConfig(loss_agg_mode=mode, entropy_coef=0.01, kl_loss_coef=0.1)
    rows = off_policy(policy_engine(tiny_model, rank_mesh), rows_of(LENGTHS))
    results = []
    for max_tokens in (4096, SMALLEST):
        engine = policy_engine(tiny_model, rank_mesh, OPTIM, max_tokens)
        results.append((update_alone(engine, rows, config), weights_of(engine)))
    (whole_metrics, whole), (split_metrics, split) = results
    assert distance(split, whole, "exp_avg.") < 1e-5
    assert distance(split, whole, "model.") < 1e-5
    assert split_metrics == pytest.approx(whole_metrics, rel=1e-5, abs=1e-7)
    assert 0 < whole_metrics["clip_frac"] < 1


def test_the_gradient_is_that_of_the_plain_model(tiny_model: Path, rank_mesh: RankMesh) -> None:
    rows = rows_of(LENGTHS[:3])
    rows.batch["response_mask"] = (torch.arange(8) < rows.batch["response_length"][:, None]).float()
    engine = policy_engine(tiny_model, rank_mesh, OPTIM, SMALLEST)
    tokens = rows.batch["response_mask"].sum().item()
    metrics = engine.train_mini_batch(rows, supervised_loss(tokens), 1.0)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    for i, (p, r) in enumerate(LENGTHS[:3]):
        ids = torch.cat([rows.batch["prompts"][i, :p], rows.batch["responses"][i, :r]])
        labels = torch.where(torch.arange(p + r) < p, -100, ids)
        (plain(ids[None], labels=labels[None]).loss * r / tokens).backward()
    gradients: dict[str, Any] = {name: parameter.grad for name, parameter in plain.named_parameters()}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    moments = weights_of(engine)
    for name, _ in engine.model.named_parameters():
        seen = moments[f"exp_avg.hf.{name}"] / 0.1  # the first moment after one step is (1 − β₁) × gradient
        torch.testing.assert_close(seen, gradients[name], rtol=1e-4, atol=1e-6, msg=name)


def test_the_gradient_is_clipped_to_its_norm(tiny_model: Path, rank_mesh: RankMesh) -> None:
    rows = off_policy(policy_engine(tiny_model, rank_mesh), rows_of(LENGTHS))
    engine = policy_engine(tiny_model, rank_mesh, OptimConfig(lr=1e-3, grad_clip=0.01))
    assert update_alone(engine, rows)["grad_norm"] > 0.05
    moments = [tensor for name, tensor in weights_of(engine).items() if name.startswith("exp_avg.")]
    assert torch.stack([m.norm() for m in moments]).norm().item() / 0.1 == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_left_out_and_changes_nothing(
    tiny_model: Path, rank_mesh: RankMesh, bad: float
) -> None:
    optim = OptimConfig(lr=1e-3, lr_schedule="linear", grad_clip=1e9, max_skipped_updates=1)
    engine = policy_engine(tiny_model, rank_mesh, optim, SMALLEST)
    rows = off_policy(engine, rows_of(LENGTHS))
    assert update_alone(engine, rows)["skipped_updates"] == 0
    before = weights_of(engine)
    poisoned = rows[:]
    poisoned.batch["advantages"] = rows.batch["advantages"].clone()
    poisoned.batch["advantages"][2, 1] = bad
    assert update_alone(engine, poisoned) == {"skipped_updates": 1.0}
    assert engine.updates == 1
    after = weights_of(engine)
    assert all(torch.equal(after[name], before[name]) for name in before)
    # Nothing of the bad gradient is left for the next step either, and the schedule goes on where it was.
    same = policy_engine(tiny_model, rank_mesh, optim, SMALLEST)
    update_alone(same, rows)
    assert update_alone(engine, rows) == update_alone(same, rows)
    # Two in a row are one too many; the good step in between did not count.
    update_alone(engine, poisoned)
    with pytest.raises(TrainingError, match="optimizer step 2 is not finite .* 2 times in a row"):
        update_alone(engine, poisoned)


def test_the_learning_rate_follows_its_schedule(tiny_model: Path, rank_mesh: RankMesh) -> None:
    optim = OptimConfig(lr=1e-3, lr_schedule="linear", grad_clip=1e9)
    engine = policy_engine(tiny_model, rank_mesh, optim, updates=4)
    rows = off_policy(engine, rows_of(LENGTHS))
    assert [update_alone(engine, rows)["lr"] for _ in range(4)] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_whole_weights_list_a_tied_head_too(tiny_model: Path, rank_mesh: RankMesh) -> None:
    engine = policy_engine(tiny_model, rank_mesh)
    whole = dict(engine.full_parameters())
    saved = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
    assert whole.keys() == saved.keys() and "lm_head.weight" in whole
    assert all(torch.equal(whole[name], saved[name]) for name in saved)


def value_engine(path: Path, rank_mesh: RankMesh, max_tokens: int) -> TrainEngine:
    optim = OptimConfig(lr=1e-2, grad_clip=1e9)
    value = ValueModel(empty_causal_lm(path))
    return TrainEngine(value, path, rank_mesh, FSDPConfig(), "float32", optim, 10, max_tokens)


def test_a_critic_learns_its_returns_whatever_the_split(tiny_model: Path, rank_mesh: RankMesh) -> None:
    rows = rows_of(LENGTHS)
    mask_BR = rows.batch["response_mask"]
    returns_BR = mask_BR * torch.arange(len(rows))[:, None] / len(rows)
    results = []
    for max_tokens in (4096, SMALLEST):
        engine = value_engine(tiny_model, rank_mesh, max_tokens)
        (values_BR,) = engine.compute(rows)
        assert not values_BR.any()
        batch = rows.union(DataProto({"values": values_BR, "returns": returns_BR}))
        loss = value_loss(CriticConfig(), mask_BR.sum().item())
        results.append([engine.train_mini_batch(batch, loss)["vf_loss"] for _ in range(6)])
    assert results[0] == pytest.approx(results[1], rel=1e-3)
    assert results[0][-1] < 0.5 * results[0][0]
