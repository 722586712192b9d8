"""Importance weights and rejection masks; the ratio is that of the trainer's policy to the rollout engine's."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_core.algorithms.correction import importance_weights, mismatch_metrics, rejection_mask
from rl_core.config.schema import CorrectionConfig
from rl_core.data.protocol import DataProto
from rl_core.trainer.advantage import apply_rollout_correction

LEVELS = ["token", "sequence_mean", "sequence_sum", "sequence_max"]
quick = settings(deadline=None, max_examples=40)


def of_ratios(ratios: list[list[float]], mask: list[list[float]] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Old and rollout log-probs with the given ratios, and a mask."""
    rollout_BR = torch.full((len(ratios), len(ratios[0])), -1.0)
    old_BR = rollout_BR + torch.tensor(ratios).log()
    return old_BR, rollout_BR, torch.tensor(mask) if mask else torch.ones_like(old_BR)


def test_bounds_are_on_the_ratio_itself() -> None:
    """0.3 is below 0.5, though its inverse is not above 5."""
    ratios = [[0.3, 0.49, 0.51, 1.0, 1.99, 2.01, 4.9, 5.1]]
    kept_BR = rejection_mask(*of_ratios(ratios), "token", (0.5, 5.0))
    assert kept_BR.tolist() == [[0, 0, 1, 1, 1, 1, 1, 0]]
    assert rejection_mask(*of_ratios(ratios), "token", (0.5, 2.0)).tolist() == [[0, 0, 1, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("level", "kept"),
    [
        # Ratios 4 and 1/4, then 1.5 twice, then 3 beside 1, then 1/3 beside 1.
        ("sequence_mean", [1, 1, 1, 1]),
        ("sequence_sum", [1, 0, 0, 0]),
        ("sequence_max", [0, 1, 0, 0]),
    ],
)
def test_a_sequence_is_rejected_whole(level: str, kept: list[int]) -> None:
    ratios = [[4.0, 0.25], [1.5, 1.5], [3.0, 1.0], [1 / 3, 1.0]]
    mask_BR = rejection_mask(*of_ratios(ratios), level, (0.5, 2.0))
    assert mask_BR.tolist() == [[k, k] for k in kept]


def test_the_furthest_ratio_may_be_the_smallest() -> None:
    kept_BR = rejection_mask(*of_ratios([[1.9, 0.4], [1.9, 0.6]]), "sequence_max", (0.5, 2.0))
    assert kept_BR.tolist() == [[0, 0], [1, 1]]


def test_a_masked_token_rejects_nothing() -> None:
    given = of_ratios([[100.0, 1.0]], [[0.0, 1.0]])
    for level in LEVELS:
        assert rejection_mask(*given, level, (0.5, 2.0)).tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize(
    ("level", "bounds", "weights"),
    [
        ("token", (0.0, 2.0), [[0.25, 2.0, 2.0], [1.0, 1.5, 0.0]]),
        ("token", (0.5, 2.0), [[0.0, 2.0, 0.0], [1.0, 1.5, 0.0]]),
        ("sequence", (0.0, 1.25), [[1.25] * 3, [1.25, 1.25, 0.0]]),
        ("sequence", (0.5, 1.75), [[0.0] * 3, [1.5, 1.5, 0.0]]),
    ],
)
def test_weights_are_held_or_dropped_outside_their_bounds(
    level: str, bounds: tuple[float, float], weights: list[list[float]]
) -> None:
    given = of_ratios([[0.25, 2.0, 4.0], [1.0, 1.5, 9.0]], [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    seen = importance_weights(*given, level, bounds)
    # 2.0 is a bound: float noise may put it on either side.
    on = torch.tensor(weights) != 2.0
    torch.testing.assert_close(seen[on], torch.tensor(weights)[on])


@quick
@given(seed=st.integers(0, 2**32), level=st.sampled_from(["token", "sequence"]))
def test_normalised_weights_have_mean_1_and_no_gradient(seed: int, level: str) -> None:
    g = torch.Generator().manual_seed(seed)
    old_BR = torch.randn(4, 5, generator=g, requires_grad=True)
    rollout_BR, mask_BR = torch.randn(4, 5, generator=g), (torch.rand(4, 5, generator=g) < 0.7).float()
    mask_BR[0, 0] = 1
    weights_BR = importance_weights(old_BR, rollout_BR, mask_BR, level, (0.0, 3.0), normalise=True)
    assert (weights_BR.sum() / mask_BR.sum()).item() == pytest.approx(1, abs=1e-5)
    assert not weights_BR.requires_grad and not weights_BR[mask_BR == 0].any()


@quick
@given(seed=st.integers(0, 2**32), level=st.sampled_from(LEVELS))
def test_equal_policies_are_left_alone(seed: int, level: str) -> None:
    g = torch.Generator().manual_seed(seed)
    old_BR, mask_BR = -torch.rand(3, 4, generator=g), (torch.rand(3, 4, generator=g) < 0.7).float()
    assert torch.equal(rejection_mask(old_BR, old_BR, mask_BR, level, (0.9, 1.1)), mask_BR)
    kind = level.partition("_")[0]
    assert torch.equal(importance_weights(old_BR, old_BR, mask_BR, kind, (0.9, 1.1), normalise=True), mask_BR)


def test_empty_masks_give_zeros() -> None:
    old_BR, rollout_BR, _ = of_ratios([[4.0, 0.25]])
    empty_BR = torch.zeros(1, 2)
    for level in LEVELS:
        assert not rejection_mask(old_BR, rollout_BR, empty_BR, level, (0.5, 2.0)).any()
    for normalise in (False, True):
        assert not importance_weights(old_BR, rollout_BR, empty_BR, "sequence", (0.0, 2.0), normalise).any()
    metrics = mismatch_metrics(old_BR, rollout_BR, empty_BR)
    assert all(math.isfinite(value) for value in metrics.values())


def test_far_policies_stay_finite() -> None:
    old_BR, rollout_BR = torch.zeros(1, 40), torch.full((1, 40), -300.0)
    for one, other in ((old_BR, rollout_BR), (rollout_BR, old_BR)):
        weights_BR = importance_weights(one, other, torch.ones(1, 40), "sequence", (0.0, 2.0), True)
        assert torch.isfinite(weights_BR).all()
        assert math.isfinite(mismatch_metrics(one, other, torch.ones(1, 40))["rollout_k3"])


def test_the_mismatch_in_numbers() -> None:
    metrics = mismatch_metrics(*of_ratios([[2.0, 0.5, 9.0]], [[1.0, 1.0, 0.0]]))
    assert metrics["rollout_k1"] == pytest.approx(0, abs=1e-6)
    assert metrics["rollout_k3"] == pytest.approx((2 - 1 - math.log(2) + 0.5 - 1 + math.log(2)) / 2)
    assert metrics["rollout_max_difference"] == pytest.approx(math.log(2))
    assert metrics["effective_sample_size"] == pytest.approx(2.5**2 / (2 * (4 + 0.25)))


def test_rejected_tokens_leave_the_mask_and_weights_follow_it() -> None:
    old_BR, rollout_BR, mask_BR = of_ratios([[4.0, 1.5, 1.0], [1.0, 1.0, 9.0]], [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    tensors = {"old_log_probs": old_BR, "rollout_log_probs": rollout_BR, "response_mask": mask_BR}
    config = CorrectionConfig(reject="token", weights="token", weight_bounds=(0.0, 1.25))
    batch, metrics = apply_rollout_correction(DataProto(tensors), config)
    assert batch.batch["response_mask"].tolist() == [[0, 1, 1], [1, 1, 0]]
    torch.testing.assert_close(batch.batch["weights"], torch.tensor([[0, 1.25, 1.0], [1.0, 1.0, 0]]))
    assert metrics == {
        "correction/rejected_share": pytest.approx(0.2),
        "correction/weight_mean": pytest.approx(4.25 / 4),
        "correction/bounded_share": pytest.approx(0.25),
    }
    untouched, nothing = apply_rollout_correction(DataProto(tensors), CorrectionConfig())
    assert untouched.batch.keys() == tensors.keys() and nothing == {}


def test_unknown_levels_are_errors() -> None:
    with pytest.raises(ValueError, match="sequence_min"):
        rejection_mask(*of_ratios([[1.0]]), "sequence_min", (0.5, 2.0))
