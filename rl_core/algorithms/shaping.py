"""Shaping before advantage estimation: overlong penalty, dynamic sampling, reweighting."""

import torch
from torch import Tensor

from rl_core.algorithms.advantages import EQUAL, Groups


def overlong_penalty(length_B: Tensor, longest: int, buffer: int, penalty: float) -> Tensor:
    """min(−(length − (longest − buffer)) / buffer · penalty, 0) [B]. Source: DAPO, arXiv 2503.14476, equation 13.

    Responses of up to `longest − buffer` tokens have no penalty; it grows linearly to `penalty` at `longest` tokens.
    """
    return (-(length_B - (longest - buffer)) / buffer * penalty).clamp(max=0)


def groups_with_spread(outcome_B: Tensor, group_B: Tensor) -> Tensor:
    """Whether the outcomes [B] of each row's group differ. Source: DAPO, arXiv 2503.14476, equation 11.

    The outcome is the score before shaping: shaping would add differences to groups of equal scores.
    """
    return Groups(outcome_B, group_B).range_B > EQUAL


def pf_ppo_weights(score_B: Tensor, kind: str, power: float) -> Tensor:
    """Resampling probability [B] of each row in policy-filtered PPO. Source: arXiv 2409.06957.

    Args:
        kind: `pow`: |score|^power; `max_min`: only the best and worst rows; `max_random`: 0.4 for the best rows and 0.1
            for the others (all before normalisation).
    """
    if kind == "pow":
        weight_B = score_B.abs() ** power
    elif kind == "max_min":
        weight_B = ((score_B == score_B.max()) | (score_B == score_B.min())).float()
    elif kind == "max_random":
        weight_B = torch.where(score_B == score_B.max(), 0.4, 0.1)
    else:
        raise ValueError(f"unknown reweighting {kind!r}")
    total = weight_B.sum()
    # All weights 0: resample uniformly.
    return weight_B / total if total > 0 else torch.full_like(score_B, 1 / max(len(score_B), 1))


def resample(weight_B: Tensor, generator: torch.Generator) -> Tensor:
    """Row indices [B] sampled with these probabilities, with replacement."""
    return torch.multinomial(weight_B, len(weight_B), replacement=True, generator=generator)
