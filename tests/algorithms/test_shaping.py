import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.algorithms.advantages import ESTIMATORS
from rl_core.algorithms.shaping import groups_with_spread, overlong_penalty, pf_ppo_weights, resample

quick = settings(deadline=None, max_examples=40)
KINDS = ["pow", "max_min", "max_random"]


def test_the_penalty_of_overlong_responses_has_three_regions() -> None:
    """None up to 16 of 20 tokens, then falling in a line, the whole at 20 tokens."""
    penalty_B = overlong_penalty(torch.tensor([0.0, 8, 16, 17, 18, 20]), longest=20, buffer=4, penalty=2.0)
    torch.testing.assert_close(penalty_B, torch.tensor([0.0, 0, 0, -0.5, -1, -2]))


def test_groups_with_spread_are_those_whose_outcomes_differ() -> None:
    group_B = torch.tensor([0, 1, 2, 0, 1, 3, 3])
    outcome_B = torch.tensor([1.0, 0.5, 1.0, 1.0 + 1e-9, 0.25, 0.0, 1.0])
    assert groups_with_spread(outcome_B, group_B).tolist() == [False, True, False, False, True, True, True]


@pytest.mark.parametrize("size", [3, 7, 8])
def test_equal_outcomes_are_equal_whatever_their_mean_rounds_to(size: int) -> None:
    """Eight times 0.8 have a mean in float32 that is not 0.8."""
    outcome_B = torch.tensor([tenths / 10 for tenths in range(1, 100)]).repeat_interleave(size)
    group_B = torch.arange(99).repeat_interleave(size)
    assert not groups_with_spread(outcome_B, group_B).any()
    for estimator in ("grpo", "rloo", "opo"):
        advantages_BR, _ = ESTIMATORS.resolve(estimator).function(
            outcome_B[:, None], torch.ones(len(outcome_B), 1), group_B
        )
        assert not advantages_BR.any(), estimator


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(
    scores=st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=1, max_size=8), power=st.sampled_from([0, 1, 2])
)
def test_the_probabilities_of_policy_filtering_sum_to_1(kind: str, scores: list[float], power: float) -> None:
    weight_B = pf_ppo_weights(torch.tensor(scores), kind, power)
    assert (weight_B >= 0).all() and weight_B.sum().item() == pytest.approx(1, abs=1e-6)
    drawn = resample(weight_B, torch.Generator().manual_seed(1))
    assert len(drawn) == len(scores) and (weight_B[drawn] > 0).all(), "a row of probability 0 was drawn"


def test_the_kinds_of_policy_filtering_prefer_what_they_say() -> None:
    score_B = torch.tensor([1.0, 0.0, 0.5, 1.0])
    assert pf_ppo_weights(score_B, "pow", 2.0).tolist() == pytest.approx([4 / 9, 0, 1 / 9, 4 / 9])
    assert pf_ppo_weights(score_B, "max_min", 1.0).tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    assert pf_ppo_weights(score_B, "max_random", 1.0).tolist() == pytest.approx([0.4, 0.1, 0.1, 0.4])
    assert pf_ppo_weights(torch.zeros(4), "pow", 1.0).tolist() == [0.25] * 4
    assert len(pf_ppo_weights(torch.zeros(0), "pow", 1.0)) == 0
    with pytest.raises(ValueError, match="max_mean"):
        pf_ppo_weights(score_B, "max_mean", 1.0)


def test_drawing_again_follows_the_seed_and_the_probabilities() -> None:
    weight_B = torch.tensor([0.7, 0.1, 0.1, 0.1]).repeat(100) / 100
    first, again, other = (resample(weight_B, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert (first % 4 == 0).float().mean().item() == pytest.approx(0.7, abs=0.1)
