"""The formulas against values that the field's reference implementation gives for the same inputs."""

import json
from pathlib import Path

import pytest
import torch

from rl_core.algorithms.advantages import gae, group_index, grpo
from rl_core.algorithms.kl import kl_estimate
from rl_core.algorithms.masked import aggregate_loss, masked_mean
from rl_core.algorithms.policy_losses import ppo_clip
from rl_core.algorithms.value import clipped_value_loss

GOLDEN = Path(__file__).parents[1] / "golden"
AGGREGATIONS = {"token-mean", "seq-mean-token-sum", "seq-mean-token-mean"}


def cases(name: str, key: str | None = None, known: set[str] | None = None) -> list:
    rows = json.loads((GOLDEN / f"{name}.json").read_text())
    chosen = [row for row in rows if key is None or row[key] in (known or set())]
    return [pytest.param(row, id=f"{row.get(key, name)}-{row['mask']}-{i}") for i, row in enumerate(chosen)]


def tensors(case: dict) -> dict[str, torch.Tensor]:
    return {k: torch.tensor(v) for k, v in case["inputs"].items() if isinstance(v, list) and k != "uid"}


def close(seen: torch.Tensor, wanted: object, mask: torch.Tensor | None = None) -> None:
    expected = torch.tensor(wanted)
    if mask is not None:
        seen, expected = seen * mask, expected * mask
    torch.testing.assert_close(seen, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", cases("advantage", "estimator", {"grpo", "gae"}))
def test_advantages(case: dict) -> None:
    x = tensors(case)
    mask, rewards = x["response_mask"], x["token_level_rewards"]
    if case["estimator"] == "grpo":
        advantages, returns = grpo(rewards, mask, group_index([str(u) for u in case["inputs"]["uid"]]))
        alone = torch.bincount(group_index([str(u) for u in case["inputs"]["uid"]]))
        # The reference gives a group of one its raw reward; here a group of one has no advantage.
        mask = mask * (alone[group_index([str(u) for u in case["inputs"]["uid"]])] > 1)[:, None]
    else:
        advantages, returns = gae(rewards, x["values"], mask, case["inputs"]["gamma"], case["inputs"]["lam"])
    close(advantages, case["advantages"], mask)
    close(returns, case["returns"], mask)


@pytest.mark.parametrize("case", cases("policy_loss", "loss", {"vanilla"}))
def test_policy_loss_and_gradient(case: dict) -> None:
    x, settings = tensors(case), case["settings"]
    log_prob, mask = x["log_prob"].requires_grad_(), x["response_mask"]
    clip = settings["clip_ratio"]
    low, high = settings.get("clip_ratio_low") or clip, settings.get("clip_ratio_high") or clip
    loss, _, _ = ppo_clip(log_prob, x["old_log_prob"], x["advantages"], low, high, settings.get("clip_ratio_c", 3.0))
    value = aggregate_loss(loss, mask, case["aggregation"], float(mask.sum()), len(mask))
    value.backward()
    close(value.detach(), case["value"])
    close(log_prob.grad, case["grad_log_prob"])


@pytest.mark.parametrize("case", cases("kl", "estimator", {"k1", "k2", "k3"}))
def test_kl(case: dict) -> None:
    x = tensors(case)
    close(kl_estimate(x["log_prob"], x["ref_log_prob"], case["estimator"]), case["kl"])


@pytest.mark.parametrize("case", cases("value_loss"))
def test_value_loss(case: dict) -> None:
    x = tensors(case)
    loss = clipped_value_loss(x["vpreds"], x["values"], x["returns"], case["inputs"]["cliprange_value"])
    close(masked_mean(loss, x["response_mask"]), case["loss"])


@pytest.mark.parametrize("case", cases("aggregate", "mode", AGGREGATIONS))
def test_aggregation(case: dict) -> None:
    x = tensors(case)
    mask, tokens = x["response_mask"], case["inputs"].get("batch_num_tokens")
    sequences = case["inputs"].get("global_batch_size")
    seen = aggregate_loss(x["loss"], mask, case["mode"], tokens or float(mask.sum()), sequences or len(mask))
    close(seen, case["value"])


def test_grpo_gives_nothing_to_groups_of_one_and_of_equal_rewards() -> None:
    rewards = torch.tensor([[0.5, 0.0], [1.0, 0.0], [1.0 + 1e-9, 0.0]])
    advantages, _ = grpo(rewards, torch.ones(3, 2), group_index(["a", "b", "b"]))
    assert torch.equal(advantages, torch.zeros(3, 2))


def test_grpo_ignores_a_constant_added_to_a_group() -> None:
    rewards = torch.rand(8, 1)
    groups = group_index(["a", "b"] * 4)
    shifted, _ = grpo(rewards + 3.0, torch.ones(8, 1), groups)
    torch.testing.assert_close(grpo(rewards, torch.ones(8, 1), groups)[0], shifted, atol=1e-4, rtol=1e-4)


def test_empty_masks_give_no_nan() -> None:
    empty = torch.zeros(2, 3)
    assert aggregate_loss(torch.ones(2, 3), empty, "seq-mean-token-mean", 0, 0).item() == 0
    assert masked_mean(torch.ones(2, 3), empty).item() == 0
    assert torch.isfinite(gae(empty, empty, empty, 1.0, 1.0)[0]).all()
