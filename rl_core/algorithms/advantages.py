"""Advantage estimators: pure functions from token-level rewards and masks to advantages and returns.

All take `rewards_BR` and `mask_BR` [B, R] and `group_B` [B], the index of each row's group (the responses to one
prompt), and return (advantages, returns) [B, R], which are 0 where the mask is 0. Masked positions inside a response
(tool output) are skipped and do not end it. For an empty mask everything is 0. Group-relative advantages are 0 for a
group of one, and for a group whose rewards are equal within 1e-8. Non-finite rewards are not checked here; the trainer
rejects them before.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rl_core.algorithms.masked import whiten
from rl_core.algorithms.registry import Registry

Estimate = tuple[Tensor, Tensor]
ESTIMATORS: Registry[Callable[..., Estimate]] = Registry("advantage estimator", "algorithm.estimator")

EQUAL = 1e-8
"""Rewards of a group within this range count as equal: float noise must not become an advantage of ±1."""


def group_index(uids: list[str]) -> Tensor:
    """Group index [B] of each row, numbered in order of first appearance."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids])


class Groups:
    """Group statistics of a per-row value [B], broadcast back to the rows."""

    def __init__(self, values_B: Tensor, group_B: Tensor) -> None:
        self.values_B, self.group_B = values_B, group_B
        self.number = int(group_B.max()) + 1 if len(group_B) else 0
        self.count_B = self.sum(torch.ones_like(values_B))
        self.mean_B = self.sum(values_B) / self.count_B
        self.centred_B = values_B - self.mean_B
        # Max − min, not the distance to the mean: the float mean of eight times 0.8 is not exactly 0.8.
        self.range_B = self.largest(values_B) + self.largest(-values_B)
        # A group of one and a group of equal values carry no signal.
        self.flat_B = (self.range_B <= EQUAL) | (self.count_B < 2)

    def sum(self, values_B: Tensor) -> Tensor:
        """Sum over each row's group [B]."""
        return torch.zeros(self.number).index_add(0, self.group_B, values_B)[self.group_B]

    def largest(self, values_B: Tensor) -> Tensor:
        """Largest value of each row's group [B]."""
        start_G = torch.full((self.number,), -torch.inf)
        return start_G.scatter_reduce(0, self.group_B, values_B, "amax")[self.group_B]

    @property
    def std_B(self) -> Tensor:
        """Unbiased standard deviation of each row's group [B]; 0 for a group of one."""
        return (self.sum(self.centred_B**2) / (self.count_B - 1).clamp(min=1)).sqrt()


def _broadcast(advantage_B: Tensor, flat_B: Tensor, mask_BR: Tensor) -> Estimate:
    advantages_BR = torch.where(flat_B, 0.0, advantage_B)[:, None] * mask_BR
    return advantages_BR, advantages_BR


def on_sampled_tokens(rewards_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Rewards [B, R], moved from masked tokens (tool output, rejected tokens) to the preceding sampled token."""
    place_BR = (mask_BR * torch.arange(rewards_BR.shape[1])).long().cummax(-1).values
    return torch.zeros_like(rewards_BR).scatter_add(-1, place_BR, rewards_BR)


def reward_to_go(rewards_BR: Tensor, mask_BR: Tensor, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each token on [B, R]; masked positions apply no discount."""
    rewards_BR = on_sampled_tokens(rewards_BR, mask_BR)
    running_B = torch.zeros(len(rewards_BR))
    columns = []
    for t in reversed(range(rewards_BR.shape[1])):
        running_B = torch.where(mask_BR[:, t] > 0, rewards_BR[:, t] + gamma * running_B, running_B)
        columns.append(running_B)
    return torch.stack(columns[::-1], dim=1)


@ESTIMATORS.register("gae", needs=("values_BR", "gamma", "lam"))
def gae(rewards_BR: Tensor, mask_BR: Tensor, group_B: Tensor, values_BR: Tensor, gamma: float, lam: float) -> Estimate:
    """Generalised advantage estimation, whitened over the batch; returns = unwhitened advantage + value.

    Source: arXiv 1506.02438, equation 16. Masked positions pass value and running sum through unchanged.
    """
    rewards_BR = on_sampled_tokens(rewards_BR, mask_BR)
    advantage_B = torch.zeros(len(rewards_BR))
    next_value_B = torch.zeros(len(rewards_BR))
    columns = []
    for t in reversed(range(rewards_BR.shape[1])):
        sampled_B = mask_BR[:, t] > 0
        delta_B = rewards_BR[:, t] + gamma * next_value_B - values_BR[:, t]
        advantage_B = torch.where(sampled_B, delta_B + gamma * lam * advantage_B, advantage_B)
        next_value_B = torch.where(sampled_B, values_BR[:, t], next_value_B)
        columns.append(advantage_B)
    advantages_BR = torch.stack(columns[::-1], dim=1)
    return whiten(advantages_BR, mask_BR) * mask_BR, (advantages_BR + values_BR) * mask_BR


@ESTIMATORS.register("grpo")
def grpo(rewards_BR: Tensor, mask_BR: Tensor, group_B: Tensor) -> Estimate:
    """(R − group mean) / (unbiased standard deviation + 1e-6). Source: arXiv 2402.03300, section 4.1.2."""
    groups = Groups(rewards_BR.sum(-1), group_B)
    return _broadcast(groups.centred_B / (groups.std_B + 1e-6), groups.flat_B, mask_BR)


@ESTIMATORS.register("dr_grpo")
def dr_grpo(rewards_BR: Tensor, mask_BR: Tensor, group_B: Tensor) -> Estimate:
    """R − group mean, without GRPO's division, which favours very easy and very hard prompts.

    Source: arXiv 2503.20783.
    """
    groups = Groups(rewards_BR.sum(-1), group_B)
    return _broadcast(groups.centred_B, groups.flat_B, mask_BR)


@ESTIMATORS.register("grpo_passk")
def grpo_passk(rewards_BR: Tensor, mask_BR: Tensor, group_B: Tensor) -> Estimate:
    """(R_max − R_second) / (standard deviation + 1e-6) for the best response of a group, 0 for the others.

    Source: arXiv 2503.19595. In a tie the first one is the best, with advantage 0.
    """
    reward_B = rewards_BR.sum(-1)
    groups = Groups(reward_B, group_B)
    best_B = torch.zeros(len(reward_B), dtype=torch.bool)
    for group in group_B.unique():
        rows = (group_B == group).nonzero().flatten()
        best_B[rows[reward_B[rows].argmax()]] = True
    second_B = groups.largest(torch.where(best_B, -torch.inf, reward_B))
    gap_B = torch.where(best_B & (groups.count_B > 1), reward_B - second_B, 0.0)
    return _broadcast(gap_B / (groups.std_B + 1e-6), groups.flat_B, mask_BR)


@ESTIMATORS.register("rloo")
def rloo(rewards_BR: Tensor, mask_BR: Tensor, group_B: Tensor) -> Estimate:
    """R − mean of the other responses of the group = n/(n−1) · (R − mean). Source: arXiv 2402.14740, section 3.3."""
    groups = Groups(rewards_BR.sum(-1), group_B)
    factor_B = groups.count_B / (groups.count_B - 1).clamp(min=1)
    return _broadcast(factor_B * groups.centred_B, groups.flat_B, mask_BR)


@ESTIMATORS.register("reinforce_plus_plus", needs=("gamma",))
def reinforce_plus_plus(rewards_BR: Tensor, mask_BR: Tensor, group_B: Tensor, gamma: float) -> Estimate:
    """Discounted reward to go, whitened over the batch. Source: arXiv 2501.03262."""
    returns_BR = reward_to_go(rewards_BR, mask_BR, gamma) * mask_BR
    return whiten(returns_BR, mask_BR) * mask_BR, returns_BR


@ESTIMATORS.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(rewards_BR: Tensor, mask_BR: Tensor, group_B: Tensor) -> Estimate:
    """R − group mean, whitened over the batch's tokens. Source: arXiv 2501.03262, the variant with baseline."""
    groups = Groups(rewards_BR.sum(-1), group_B)
    centred_BR, _ = _broadcast(groups.centred_B, groups.flat_B, mask_BR)
    # Whitening shifts the zeros of flat groups; reset them to 0.
    advantages_BR = whiten(centred_BR, mask_BR) * mask_BR * ~groups.flat_B[:, None]
    return advantages_BR, advantages_BR


@ESTIMATORS.register("remax", needs=("greedy_reward_B",))
def remax(rewards_BR: Tensor, mask_BR: Tensor, group_B: Tensor, greedy_reward_B: Tensor) -> Estimate:
    """Reward to go − reward of the greedy response to the same prompt [B]. Source: arXiv 2310.10505."""
    returns_BR = reward_to_go(rewards_BR, mask_BR, 1.0) * mask_BR
    return (returns_BR - greedy_reward_B[:, None]) * mask_BR, returns_BR


@ESTIMATORS.register("opo")
def opo(rewards_BR: Tensor, mask_BR: Tensor, group_B: Tensor) -> Estimate:
    """R − length-weighted group mean; length in response tokens. Source: arXiv 2505.23585, equation 10."""
    reward_B, length_B = rewards_BR.sum(-1), mask_BR.sum(-1)
    groups = Groups(reward_B, group_B)
    baseline_B = groups.sum(length_B * reward_B) / groups.sum(length_B).clamp(min=1)
    return _broadcast(reward_B - baseline_B, groups.flat_B, mask_BR)


@ESTIMATORS.register("gpg")
def gpg(rewards_BR: Tensor, mask_BR: Tensor, group_B: Tensor) -> Estimate:
    """α · (R − group mean) with α = rows / rows with non-zero reward. Source: arXiv 2504.02546."""
    reward_B = rewards_BR.sum(-1)
    groups = Groups(reward_B, group_B)
    alpha = len(reward_B) / (reward_B != 0).sum().clamp(min=1)
    return _broadcast(alpha * groups.centred_B, groups.flat_B, mask_BR)


@ESTIMATORS.register("optimal_token_baseline", needs=("old_log_probs_BR", "sum_pi_squared_BR"))
def optimal_token_baseline(
    rewards_BR: Tensor, mask_BR: Tensor, group_B: Tensor, old_log_probs_BR: Tensor, sum_pi_squared_BR: Tensor
) -> Estimate:
    """Reward to go − minimum-variance baseline for each token position of the group.

    B_t = Σ_G R_t W_t / Σ_G W_t with W_t = Σ_{j≤t} (1 − 2π_j + Σ_v π_v²), the accumulated squared norm of the policy's
    score function. `sum_pi_squared_BR` is Σ_v π_v² of the distribution that each token was sampled from.
    """
    returns_BR = reward_to_go(rewards_BR, mask_BR, 1.0) * mask_BR
    norm_BR = (1 - 2 * old_log_probs_BR.exp() + sum_pi_squared_BR) * mask_BR
    weight_BR = norm_BR.cumsum(-1) * mask_BR
    number = int(group_B.max()) + 1 if len(group_B) else 0
    width = rewards_BR.shape[1]

    def over_group(values_BR: Tensor) -> Tensor:
        return torch.zeros(number, width).index_add(0, group_B, values_BR)[group_B]

    baseline_BR = over_group(returns_BR * weight_BR) / (over_group(weight_BR) + 1e-8)
    # The tail of a single longest response would only have itself as baseline, so its baseline is 0. As in the
    # reference, the tail starts at the index equal to the second longest's number of sampled tokens, even if there is
    # tool output in between.
    lengths = Groups(mask_BR.sum(-1), group_B)
    longest_B = lengths.values_B == lengths.largest(lengths.values_B)
    single_B = longest_B & (lengths.sum(longest_B.float()) == 1)
    second_B = lengths.largest(torch.where(longest_B, -torch.inf, lengths.values_B))
    tail_BR = single_B[:, None] & (torch.arange(width) >= second_B[:, None])
    baseline_BR = torch.where(tail_BR, 0.0, baseline_BR)
    flat_B = Groups(rewards_BR.sum(-1), group_B).flat_B
    advantages_BR = torch.where(flat_B[:, None], 0.0, returns_BR - baseline_BR) * mask_BR
    return advantages_BR, returns_BR


@ESTIMATORS.register("gdpo", needs=("named_rewards", "reward_weights"))
def gdpo(
    rewards_BR: Tensor,
    mask_BR: Tensor,
    group_B: Tensor,
    named_rewards: dict[str, Tensor],
    reward_weights: dict[str, float],
) -> Estimate:
    """Σ_k w_k · grpo(R_k) over the named rewards, each [B], then whitened; the default weight is 1.

    Normalising each reward separately keeps rewards with a small spread from vanishing in the sum.
    """
    total_B, flat_B = torch.zeros(len(rewards_BR)), torch.ones(len(rewards_BR), dtype=torch.bool)
    for name, reward_B in named_rewards.items():
        groups = Groups(reward_B, group_B)
        advantage_B = torch.where(groups.flat_B, 0.0, groups.centred_B / (groups.std_B + 1e-6))
        total_B, flat_B = total_B + reward_weights.get(name, 1.0) * advantage_B, flat_B & groups.flat_B
    advantages_BR = whiten(total_B[:, None] * mask_BR, mask_BR) * mask_BR * ~flat_B[:, None]
    return advantages_BR, advantages_BR
