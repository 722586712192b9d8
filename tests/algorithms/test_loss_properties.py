"""What must hold for policy losses, aggregation and KL terms whatever the batch is."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_core.algorithms.kl import KLController, kl_estimate
from rl_core.algorithms.masked import aggregate_loss, masked_mean, whiten
from rl_core.algorithms.policy_losses import (
    POLICY_LOSSES,
    LossSettings,
    Tokens,
    covariance_band,
    highest_covariance,
)
from rl_core.algorithms.value import clipped_value_loss

B, R = 5, 6
EVERY = sorted(POLICY_LOSSES.entries)
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
SETTINGS = LossSettings()
seeds = st.integers(0, 2**32)
quick = settings(deadline=None, max_examples=30)


def drawn(seed: int, off_policy: float = 0.4) -> tuple[Tokens, Tensor]:
    """Tokens with a mask that has gaps, and tokens that were selected for kl_cov and clip_cov."""
    g = torch.Generator().manual_seed(seed)
    old_BR = -3 * torch.rand(B, R, generator=g)
    log_prob_BR = old_BR + off_policy * torch.randn(B, R, generator=g)
    mask_BR = (torch.rand(B, R, generator=g) < 0.7).float()
    mask_BR[:, 0] = 1
    selected_BR = (torch.rand(B, R, generator=g) < 0.3).float() * mask_BR
    return Tokens(log_prob_BR, old_BR, torch.randn(B, 1, generator=g) * mask_BR, mask_BR), selected_BR


def loss_and_gradient(name: str, t: Tokens, selected_BR: Tensor) -> tuple[Tensor, Tensor]:
    entry = POLICY_LOSSES.resolve(name)
    log_prob_BR = t.log_prob_BR.clone().requires_grad_()
    needed = {"selected_BR": selected_BR} if entry.needs else {}
    token_BR, indicators = entry.function(t._replace(log_prob_BR=log_prob_BR), SETTINGS, **needed)
    assert token_BR.shape == t.mask_BR.shape and all(x.shape == t.mask_BR.shape for x in indicators.values())
    loss = aggregate_loss(token_BR, t.mask_BR, entry.agg_mode or "token-mean", float(t.mask_BR.sum()), len(t.mask_BR))
    loss.backward()
    assert log_prob_BR.grad is not None
    return loss.detach(), log_prob_BR.grad


@pytest.mark.parametrize("name", EVERY)
@quick
@given(seed=seeds)
def test_masked_tokens_have_no_gradient_and_change_nothing(name: str, seed: int) -> None:
    t, selected_BR = drawn(seed)
    noise_BR = 50 * torch.randn(B, R, generator=torch.Generator().manual_seed(seed + 1))
    other = Tokens._make([*(torch.where(t.mask_BR == 0, noise_BR, x) for x in t[:3]), t.mask_BR])
    (loss, grad_BR), (other_loss, other_BR) = (loss_and_gradient(name, x, selected_BR) for x in (t, other))
    torch.testing.assert_close(other_loss, loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(other_BR, grad_BR, rtol=1e-6, atol=1e-7)
    assert not other_BR[t.mask_BR == 0].any()


@pytest.mark.parametrize("name", EVERY)
def test_empty_masks_give_a_loss_of_zero(name: str) -> None:
    t, selected_BR = drawn(0)
    loss, grad_BR = loss_and_gradient(name, t._replace(mask_BR=torch.zeros(B, R)), selected_BR)
    assert loss == 0 and not grad_BR.any()
    mask_BR = t.mask_BR.clone()
    mask_BR[0] = 0
    loss, grad_BR = loss_and_gradient(name, t._replace(mask_BR=mask_BR), selected_BR)
    assert torch.isfinite(loss) and torch.isfinite(grad_BR).all() and not grad_BR[0].any()


@pytest.mark.parametrize("name", EVERY)
@quick
@given(seed=seeds)
def test_on_policy_the_gradient_is_that_of_the_plain_policy_gradient(name: str, seed: int) -> None:
    """At ratio 1 nothing is clipped, and every loss has the gradient of −A·log π."""
    t, selected_BR = drawn(seed, off_policy=0.0)
    if name == "clip_cov":  # it takes the gradient away from selected tokens
        selected_BR = torch.zeros_like(selected_BR)
    _, grad_BR = loss_and_gradient(name, t, selected_BR)
    mode = POLICY_LOSSES.resolve(name).agg_mode or "token-mean"
    log_prob_BR = t.log_prob_BR.clone().requires_grad_()
    aggregate_loss(-t.advantage_BR * log_prob_BR, t.mask_BR, mode, float(t.mask_BR.sum()), B).backward()
    assert log_prob_BR.grad is not None
    torch.testing.assert_close(grad_BR, log_prob_BR.grad, rtol=1e-5, atol=1e-7)
    _, indicators = POLICY_LOSSES.resolve(name).function(
        t, SETTINGS, **({"selected_BR": selected_BR} if POLICY_LOSSES.resolve(name).needs else {})
    )
    assert not any(x.any() for key, x in indicators.items() if "clip" in key)


@pytest.mark.parametrize("name", EVERY)
@quick
@given(seed=seeds)
def test_a_small_step_down_the_gradient_makes_good_tokens_likelier(name: str, seed: int) -> None:
    """No loss pushes a token against its advantage."""
    t, selected_BR = drawn(seed, off_policy=0.05)
    # The quadratic pull of dro and the penalty of kl_cov may outweigh a small advantage.
    t = t._replace(advantage_BR=t.advantage_BR.sign() * t.mask_BR)
    _, grad_BR = loss_and_gradient(name, t, selected_BR)
    assert (grad_BR * t.advantage_BR <= 0).all() and grad_BR.any()


@pytest.mark.parametrize("name", EVERY)
def test_extreme_log_probs_keep_losses_finite(name: str) -> None:
    t, selected_BR = drawn(0)
    for far in (-1000.0, 0.0):
        loss, grad_BR = loss_and_gradient(name, t._replace(log_prob_BR=torch.full((B, R), far)), selected_BR)
        assert torch.isfinite(loss) and torch.isfinite(grad_BR).all()
    swapped = Tokens(torch.zeros(B, R), torch.full((B, R), -1000.0), t.advantage_BR, t.mask_BR)
    loss, grad_BR = loss_and_gradient(name, swapped, selected_BR)
    assert torch.isfinite(loss) and torch.isfinite(grad_BR).all()


@pytest.mark.parametrize("mode", MODES)
@quick
@given(seed=seeds, cuts=st.sets(st.integers(1, B - 1)))
def test_aggregation_adds_up_over_every_split_of_the_rows(mode: str, seed: int, cuts: set[int]) -> None:
    t, _ = drawn(seed)
    counts = float(t.mask_BR.sum()), float(B)
    loss_BR = t.log_prob_BR

    def share(rows: slice) -> Tensor:
        return aggregate_loss(loss_BR[rows], t.mask_BR[rows], mode, *counts, scale=7.0)

    bounds = [0, *sorted(cuts), B]
    parts = [share(slice(a, b)) for a, b in itertools.pairwise(bounds)]
    torch.testing.assert_close(torch.stack(parts).sum(), share(slice(None)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_padding_rows_add_nothing_to_a_loss(mode: str) -> None:
    t, _ = drawn(1)
    loss_BR, mask_BR = (
        torch.cat([x, torch.full((2, R), fill)]) for x, fill in ((t.log_prob_BR, 5.0), (t.mask_BR, 0.0))
    )
    seen = aggregate_loss(loss_BR, mask_BR, mode, float(t.mask_BR.sum()), B, 7.0)
    torch.testing.assert_close(
        seen, aggregate_loss(t.log_prob_BR, t.mask_BR, mode, float(t.mask_BR.sum()), B, 7.0), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("mode", MODES)
def test_nothing_aggregates_to_zero(mode: str) -> None:
    assert aggregate_loss(torch.ones(2, 3), torch.zeros(2, 3), mode, 0, 0) == 0


def test_means_of_nothing_are_zero() -> None:
    empty_BR = torch.zeros(2, 3)
    assert masked_mean(torch.ones(2, 3), empty_BR) == 0
    assert torch.isfinite(whiten(torch.ones(2, 3), empty_BR)).all()
    one_BR = torch.tensor([[1.0, 0.0]])
    assert (whiten(torch.tensor([[3.0, 9.0]]), one_BR) * one_BR == 0).all(), "one token has no spread"


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="mean-of-means"):
        aggregate_loss(torch.ones(1, 1), torch.ones(1, 1), "mean-of-means", 1, 1)
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.ones(1, 1), torch.ones(1, 1), "k4+")


@pytest.mark.parametrize("kind", ["k1", "abs", "k3"])
@quick
@given(seed=seeds)
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind: str, seed: int) -> None:
    t, _ = drawn(seed)

    def of(name: str) -> tuple[Tensor, Tensor]:
        log_prob_BR = t.log_prob_BR.clone().requires_grad_()
        kl_BR = kl_estimate(log_prob_BR, t.old_BR, name)
        kl_BR.sum().backward()
        assert log_prob_BR.grad is not None
        return kl_BR.detach(), log_prob_BR.grad

    torch.testing.assert_close(of(f"{kind}+")[0], of(kind)[0])
    torch.testing.assert_close(of(f"{kind}+")[1], of("k2")[1])
    torch.testing.assert_close(of(f"{kind}+")[1], t.log_prob_BR - t.old_BR)


@quick
@given(seed=seeds)
def test_k3_is_never_negative_and_held(seed: int) -> None:
    t, _ = drawn(seed, off_policy=30.0)
    kl_BR = kl_estimate(t.log_prob_BR, t.old_BR, "k3")
    assert (kl_BR >= 0).all() and (kl_BR <= 10).all()
    assert (kl_estimate(t.old_BR, t.old_BR, "k3") == 0).all()


def test_the_adaptive_weight_of_the_kl_moves_towards_its_target() -> None:
    controller = KLController("adaptive", 0.1, target=0.05, horizon=1000)
    controller.update(0.055, rows=100)  # 10 % above the target
    assert controller.coef == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    controller.coef = 0.1
    controller.update(9.0, rows=100)  # held at 20 %
    assert controller.coef == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    controller.coef = 0.1
    controller.update(0.0, rows=100)
    assert controller.coef == pytest.approx(0.1 * (1 - 0.2 * 0.1))
    controller.update(0.05, rows=100)
    assert controller.coef == pytest.approx(0.1 * (1 - 0.2 * 0.1))


def test_the_fixed_weight_of_the_kl_stays() -> None:
    controller = KLController("fixed", 0.1, target=0.05, horizon=1000)
    controller.update(9.0, rows=100)
    assert controller.coef == 0.1


@quick
@given(seed=seeds, share=st.sampled_from([1e-6, 0.1, 0.5, 1.0]), count=st.integers(0, 40))
def test_the_tokens_of_highest_covariance_are_chosen(seed: int, share: float, count: int) -> None:
    g = torch.Generator().manual_seed(seed)
    log_prob_N, advantage_N = torch.randn(count, generator=g), torch.randn(count, generator=g)
    chosen_N = highest_covariance(log_prob_N, advantage_N, LossSettings(cov_share=share)) > 0
    assert chosen_N.sum() == (max(1, int(share * count)) if count else 0)
    cov_N = (log_prob_N - log_prob_N.mean()) * (advantage_N - advantage_N.mean())
    if 0 < chosen_N.sum() < count:
        assert cov_N[chosen_N].min() >= cov_N[~chosen_N].max()


@quick
@given(seed=seeds, share=st.sampled_from([1e-6, 0.1, 1.0]), count=st.integers(0, 40))
def test_clip_cov_draws_unclipped_tokens_within_the_band(seed: int, share: float, count: int) -> None:
    g = torch.Generator().manual_seed(seed)
    old_N, advantage_N = torch.randn(count, generator=g), torch.randn(count, generator=g)
    log_prob_N = old_N + 0.3 * torch.randn(count, generator=g)
    settings = LossSettings(cov_share=share, cov_low=0.2, cov_high=1.5)

    def chosen(seed: int) -> Tensor:
        drawn = covariance_band(log_prob_N, old_N, advantage_N, settings, torch.Generator().manual_seed(seed))
        return drawn > 0

    ratio_N = (log_prob_N - old_N).exp()
    clipped_N = torch.where(advantage_N > 0, ratio_N > 1.2, ratio_N < 0.8)
    cov_N = (log_prob_N - log_prob_N.mean()) * (advantage_N - advantage_N.mean())
    allowed_N = (cov_N > 0.2) & (cov_N < 1.5) & ~clipped_N
    assert not (chosen(1) & ~allowed_N).any()
    assert chosen(1).sum() == min(int(allowed_N.sum()), max(1, int(share * count)))
    assert torch.equal(chosen(1), chosen(1)), "the same seed draws the same tokens"


@quick
@given(seed=seeds)
def test_a_value_within_the_clip_has_the_plain_squared_loss(seed: int) -> None:
    t, _ = drawn(seed, off_policy=0.1)
    loss_BR, clipped_BR = clipped_value_loss(t.log_prob_BR, t.old_BR, t.advantage_BR, cliprange=10.0)
    torch.testing.assert_close(loss_BR, 0.5 * (t.log_prob_BR - t.advantage_BR) ** 2)
    assert not clipped_BR.any()


def of_one_token(name: str, ratio: float, advantage: float, settings: LossSettings, old: float = -1.0) -> float:
    """Derivative of a loss by the log-prob of a single token."""
    log_prob_BR = (torch.tensor([[old]]) + torch.tensor(ratio).log()).requires_grad_()
    t = Tokens(log_prob_BR, torch.tensor([[old]]), torch.tensor([[advantage]]), torch.ones(1, 1))
    POLICY_LOSSES.resolve(name).function(t, settings)[0].sum().backward()
    assert log_prob_BR.grad is not None
    return log_prob_BR.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [(1.35, 1.0, 0.0), (1.25, 1.0, -1.25), (0.5, 1.0, -0.5), (0.85, -1.0, 0.0), (2.5, -1.0, 2.5), (3.5, -1.0, 0.0)],
)
def test_vanilla_clips_on_both_sides_and_bad_tokens_once_more(ratio: float, advantage: float, slope: float) -> None:
    """Ranges 0.1 below and 0.3 above; where the advantage is negative the loss is at most three times it."""
    settings = LossSettings(clip_low=0.1, clip_high=0.3, clip_dual=3.0)
    assert of_one_token("vanilla", ratio, advantage, settings) == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    # Of a token with old probability 0.5: it may gain 0.2 and lose 0.05, and comes back from anywhere.
    [(1.3, 1.0, -1.3), (1.5, 1.0, 0.0), (0.8, -1.0, 0.0), (0.95, -1.0, 0.95), (0.2, 1.0, -0.2), (1.8, -1.0, 1.5)],
)
def test_the_trust_region_has_its_own_width_in_each_direction(ratio: float, advantage: float, slope: float) -> None:
    settings = LossSettings(clip_low=0.05, clip_high=0.2, weight_cap=1.5)
    old = torch.tensor(0.5).log().item()
    assert of_one_token("dppo_tv", ratio, advantage, settings, old) == pytest.approx(slope, rel=1e-5)
