"""Advantage estimators: token-level rewards and masks in, advantages and returns out; pure functions over tensors."""

import torch
from torch import Tensor

from rl_core.algorithms.masked import whiten

# Rewards of a group that differ by less are equal: float noise must not become an advantage of ±1.
EQUAL = 1e-8


def group_index(uids: list[str]) -> Tensor:
    """Group number [B] of each row, numbered in the order of appearance."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids])


def grpo(rewards_BR: Tensor, mask_BR: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor]:
    """Group-relative advantage (R − mean of the group) / (standard deviation + 1e-6), on all response tokens [B, R].

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision, with the unbiased deviation.
    A group of one and a group of equal rewards get 0. Returns (advantages, returns), which are the same.
    """
    reward_B = rewards_BR.sum(-1)
    groups = int(group_B.max()) + 1 if len(group_B) else 0
    count_G = torch.zeros(groups).index_add(0, group_B, torch.ones_like(reward_B))
    mean_G = torch.zeros(groups).index_add(0, group_B, reward_B) / count_G
    centred_B = reward_B - mean_G[group_B]
    variance_G = torch.zeros(groups).index_add(0, group_B, centred_B**2) / (count_G - 1).clamp(min=1)
    spread_G = torch.zeros(groups).scatter_reduce(0, group_B, centred_B.abs(), "amax")
    advantage_B = torch.where((spread_G <= EQUAL)[group_B], 0.0, centred_B / (variance_G.sqrt()[group_B] + 1e-6))
    advantages_BR = advantage_B[:, None] * mask_BR
    return advantages_BR, advantages_BR


def gae(rewards_BR: Tensor, values_BR: Tensor, mask_BR: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, whitened over the batch, and returns = advantage + value, both [B, R].

    Source: arXiv 1506.02438, equation 16. Masked positions are skipped: values and sums pass through them.
    """
    advantage_B = torch.zeros(len(rewards_BR))
    next_value_B = torch.zeros(len(rewards_BR))
    columns = []
    for t in reversed(range(rewards_BR.shape[1])):
        real_B = mask_BR[:, t] > 0
        delta_B = rewards_BR[:, t] + gamma * next_value_B - values_BR[:, t]
        advantage_B = torch.where(real_B, delta_B + gamma * lam * advantage_B, advantage_B)
        next_value_B = torch.where(real_B, values_BR[:, t], next_value_B)
        columns.append(advantage_B)
    advantages_BR = torch.stack(columns[::-1], dim=1)
    returns_BR = (advantages_BR + values_BR) * mask_BR
    return whiten(advantages_BR, mask_BR) * mask_BR, returns_BR
