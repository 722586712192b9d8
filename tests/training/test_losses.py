"""The losses of a mini-batch do not depend on how its rows are split into micro-batches."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_core.algorithms.policy_losses import POLICY_LOSSES
from rl_core.config.schema import CriticConfig, RunConfig
from rl_core.data.protocol import DataProto
from rl_core.training.losses import policy_loss, select_tokens, supervised_loss, value_loss

B, R = 6, 5
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
LOSSES = sorted(POLICY_LOSSES.entries)
Shares = dict[str, Tensor]
splits = st.permutations(range(B)).flatmap(
    lambda order: st.sets(st.integers(1, B - 1)).map(
        lambda cuts: [order[a:b] for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), B], strict=True)]
    )
)


def rows_of(seed: int) -> tuple[DataProto, Tensor, Tensor]:
    """Rows that a policy loss takes, and the policy's log-probs and entropies; one row has no token at all."""
    g = torch.Generator().manual_seed(seed)
    mask_BR = (torch.rand(B, R, generator=g) < 0.6).float()
    mask_BR[:, 0], mask_BR[1] = 1, 0
    old_BR = -3 * torch.rand(B, R, generator=g)
    tensors = {
        "response_mask": mask_BR,
        "old_log_probs": old_BR,
        "ref_log_prob": old_BR + 0.3 * torch.randn(B, R, generator=g),
        "advantages": torch.randn(B, R, generator=g) * mask_BR,
        "weights": torch.rand(B, R, generator=g) * mask_BR,
        "values": torch.randn(B, R, generator=g),
        "returns": torch.randn(B, R, generator=g),
    }
    log_prob_BR = (old_BR + 0.4 * torch.randn(B, R, generator=g)).requires_grad_()
    return DataProto(tensors), log_prob_BR, torch.rand(B, R, generator=g).requires_grad_()


def config_of(loss: str, mode: str = "token-mean") -> RunConfig:
    actor = {"policy_loss": loss, "loss_agg_mode": mode, "entropy_coef": 0.01, "kl_loss_coef": 0.1, "cov_ratio": 0.2}
    return RunConfig.model_validate({"actor": {**actor, "clip_cov_low": 0.0}})


def prepared(config: RunConfig, rows: DataProto, log_prob_BR: Tensor) -> DataProto:
    """The mini-batch with the tokens that its loss chooses, if it chooses any."""
    if not POLICY_LOSSES.resolve(config.actor.policy_loss).needs:
        return rows
    return select_tokens(config, rows, log_prob_BR.detach(), draw=1)


def of_split(
    config: RunConfig, rows: DataProto, log_prob_BR: Tensor, entropy_BR: Tensor, split: list[list[int]]
) -> tuple[Tensor, Shares, Tensor]:
    """Loss, metrics and gradient of a mini-batch that is computed part by part."""
    mask_BR = rows.batch["response_mask"]
    loss_function = policy_loss(config, float(mask_BR.sum()), float(B))
    log_prob_BR.grad = None
    total = torch.zeros(())
    shares: dict[str, Any] = {}
    for part in split:
        loss, of_part = loss_function((log_prob_BR[part], entropy_BR[part]), rows[part])
        loss.backward()
        total = total + loss.detach()
        shares = {name: shares.get(name, 0.0) + value.detach() for name, value in of_part.items()}
    assert log_prob_BR.grad is not None
    return total, shares, log_prob_BR.grad.clone()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", LOSSES)
@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 2**32), split=splits)
def test_no_split_changes_loss_metrics_or_gradient(loss: str, mode: str, seed: int, split: list[list[int]]) -> None:
    config = config_of(loss, mode)
    rows, log_prob_BR, entropy_BR = rows_of(seed)
    rows = prepared(config, rows, log_prob_BR)
    whole, whole_shares, whole_BR = of_split(config, rows, log_prob_BR, entropy_BR, [list(range(B))])
    parts, shares, grad_BR = of_split(config, rows, log_prob_BR, entropy_BR, split)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad_BR, whole_BR, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(shares, whole_shares, rtol=1e-4, atol=1e-5)
    assert not grad_BR[rows.batch["response_mask"] == 0].any()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_without_tokens_has_a_loss_of_zero(loss: str) -> None:
    config = config_of(loss)
    rows, log_prob_BR, entropy_BR = rows_of(0)
    rows = DataProto({**rows.batch, "response_mask": torch.zeros(B, R)})
    rows = prepared(config, rows, log_prob_BR)
    total, shares, grad_BR = of_split(config, rows, log_prob_BR, entropy_BR, [list(range(B))])
    assert total == 0 and not grad_BR.any() and all(torch.isfinite(value) for value in shares.values())


@pytest.mark.parametrize("loss", ["kl_cov", "clip_cov"])
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_only_sampled_tokens_are_selected(loss: str, seed: int) -> None:
    rows, log_prob_BR, _ = rows_of(seed)
    selected_BR = prepared(config_of(loss), rows, log_prob_BR).batch["selected_BR"]
    mask_BR = rows.batch["response_mask"]
    assert not selected_BR[mask_BR == 0].any()
    most = max(1, int(0.2 * mask_BR.sum()))
    assert selected_BR.sum() == most if loss == "kl_cov" else selected_BR.sum() <= most


def test_weights_of_the_correction_scale_the_policy_loss_only() -> None:
    rows, log_prob_BR, entropy_BR = rows_of(3)
    doubled = DataProto({**rows.batch, "weights": 2 * rows.batch["weights"]})
    config = config_of("vanilla")
    seen, wanted = (of_split(config, r, log_prob_BR, entropy_BR, [list(range(B))])[1] for r in (doubled, rows))
    torch.testing.assert_close(seen["pg_loss"], 2 * wanted["pg_loss"])
    torch.testing.assert_close(seen["kl_loss"], wanted["kl_loss"])


def test_entropy_bonus_and_kl_loss_have_their_signs_and_weights() -> None:
    rows, log_prob_BR, entropy_BR = rows_of(3)
    config = config_of("vanilla", "seq-mean-token-mean")
    total, shares, _ = of_split(config, rows, log_prob_BR, entropy_BR, [list(range(B))])
    mask_BR = rows.batch["response_mask"]
    entropy = ((entropy_BR * mask_BR).sum(-1) / mask_BR.sum(-1).clamp(min=1)).sum() / B
    torch.testing.assert_close(total, shares["pg_loss"] + 0.1 * shares["kl_loss"] - 0.01 * entropy.detach())


def test_the_constant_divisor_is_the_response_budget_unless_set() -> None:
    rows, log_prob_BR, entropy_BR = rows_of(3)

    def of(mode: str, **actor: float) -> Tensor:
        config = RunConfig.model_validate(
            {"data": {"max_response_length": 20}, "actor": {"loss_agg_mode": mode, **actor}}
        )
        return of_split(config, rows, log_prob_BR, entropy_BR, [list(range(B))])[0]

    summed = of("seq-mean-token-sum")
    torch.testing.assert_close(of("seq-mean-token-sum-norm"), summed / 20)
    torch.testing.assert_close(of("seq-mean-token-sum-norm", loss_scale_factor=8.0), summed / 8)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32), split=splits)
def test_no_split_changes_value_and_supervised_loss(seed: int, split: list[list[int]]) -> None:
    rows, output_BR, _ = rows_of(seed)
    tokens = float(rows.batch["response_mask"].sum())
    for loss_function in (value_loss(CriticConfig(), tokens), supervised_loss(tokens)):
        whole, whole_shares = loss_function((output_BR,), rows)
        each = [loss_function((output_BR[part],), rows[part]) for part in split]
        torch.testing.assert_close(torch.stack([loss for loss, _ in each]).sum(), whole, rtol=1e-4, atol=1e-5)
        for name, value in whole_shares.items():
            total = torch.stack([shares[name] for _, shares in each]).sum()
            torch.testing.assert_close(total, value, rtol=1e-4, atol=1e-5)
