"""What is drawn from given logits, and the numbers it is drawn with."""

import math

import pytest
import torch

from rl_core.errors import TrainingError
from rl_core.rollout.engine.protocol import Sampling
from rl_core.rollout.engine.sampler import draw, restricted, uniforms

LOGITS = torch.tensor([[2.0, 1.0, 1.0, -1.0, -torch.inf]])


def test_numbers_depend_on_seed_and_position_alone() -> None:
    together = uniforms([7, 8, 7, 2**32 - 1], [0, 0, 1, 5])
    assert together.tolist() == [uniforms([seed], [at]).item() for seed, at in [(7, 0), (8, 0), (7, 1), (2**32 - 1, 5)]]
    assert len(set(together.tolist())) == 4


@pytest.mark.parametrize("of_seeds", [True, False])
def test_numbers_are_uniform_and_independent(of_seeds: bool) -> None:
    """Over consecutive seeds at one position, and over the positions of one seed; neighbours are uncorrelated."""
    counted, fixed = list(range(20_000)), [3] * 20_000
    number_N = uniforms(counted, fixed) if of_seeds else uniforms(fixed, counted)
    assert ((number_N >= 0) & (number_N < 1)).all()
    counts = torch.histc(number_N, 50, 0, 1)
    assert ((counts - 400).square() / 400).sum() < 49 + 4 * math.sqrt(2 * 49)
    assert abs(torch.corrcoef(torch.stack([number_N[:-1], number_N[1:]]))[0, 1]) < 4 / math.sqrt(20_000)


def test_a_number_selects_the_token_whose_share_of_the_distribution_it_falls_into() -> None:
    probability_V = LOGITS[0].double().softmax(-1)
    edges = [0.0, *probability_V.cumsum(-1).tolist()[:3]]
    inside = torch.tensor([edge + 1e-6 for edge in edges] + [0.0, 1 - 2**-53], dtype=torch.float64)
    token_B, log_prob_B = draw(LOGITS.expand(6, -1), [Sampling(1.0, 1, ())] * 6, inside)
    assert token_B.tolist() == [0, 1, 2, 3, 0, 3]  # a token without probability is never drawn, not even at the end
    torch.testing.assert_close(log_prob_B.double(), probability_V.log()[token_B], rtol=0, atol=1e-6)


def test_each_row_has_its_own_temperature_and_greedy_rows_have_none() -> None:
    samplings = [Sampling(0.0, 1, ()), Sampling(0.5, 1, ()), Sampling(2.0, 1, ())]
    token_B, log_prob_B = draw(LOGITS.expand(3, -1), samplings, torch.tensor([0.99, 0.0, 0.0], dtype=torch.float64))
    assert token_B.tolist() == [0, 0, 0]
    wanted = [(LOGITS[0] / t).log_softmax(-1)[0].item() for t in (1.0, 0.5, 2.0)]
    assert log_prob_B.tolist() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [(1.0, 0, 4), (1.0, 1, 1), (1.0, 2, 2), (0.1, 0, 1), (0.6, 0, 2), (0.8, 0, 3), (0.999, 0, 4), (0.6, 1, 1)],
)
def test_top_p_and_top_k_keep_the_smallest_set(top_p: float, top_k: int, kept: int) -> None:
    """The probabilities are 0.56, 0.21, 0.21 and 0.03."""
    left = restricted(LOGITS, [Sampling(1.0, 1, (), top_p, top_k)])
    assert left.isfinite().sum() == kept and torch.equal(left[left.isfinite()], LOGITS[0, :kept])
    everything = restricted(LOGITS, [Sampling(0.0, 1, (), top_p, top_k)])
    assert torch.equal(everything, LOGITS)


def test_logits_that_are_not_numbers_are_an_error() -> None:
    with pytest.raises(TrainingError, match="not finite"):
        draw(torch.full((1, 4), torch.nan), [Sampling(1.0, 1, ())], torch.zeros(1, dtype=torch.float64))
