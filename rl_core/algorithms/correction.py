"""Correction of the mismatch between rollout engine and trainer: importance weights and rejection masks.

The ratio is π_old / π_rollout of the sampled tokens, detached; its logarithm is clamped to ±20. Bounds apply to the
ratio itself. Rejected tokens are removed from the loss and its denominator. An empty mask gives weights and masks of 0.
"""

import torch
from torch import Tensor

from rl_core.algorithms.masked import masked_mean

Bounds = tuple[float, float]


def log_ratio(old_BR: Tensor, rollout_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """log π_old − log π_rollout clamped to ±20; 0 where the mask is 0."""
    return (old_BR - rollout_BR).clamp(-20, 20).detach() * mask_BR


def importance_weights(
    old_BR: Tensor, rollout_BR: Tensor, mask_BR: Tensor, level: str, bounds: Bounds, normalise: bool = False
) -> Tensor:
    """Importance weights [B, R] on the mask: the ratio of each token, or of its whole sequence.

    Args:
        level: `token`, or `sequence` for the product over the sequence (its logarithm clamped to ±20).
        bounds: (0, C) truncates to at most C (arXiv 2208.05731 uses the same for V-trace); (low, high) with low > 0
            keeps ratios inside the bounds and sets others to 0 (IcePop).
        normalise: divide by the mean over the mask, so that the weights do not change the effective step size.
    """
    log_BR = log_ratio(old_BR, rollout_BR, mask_BR)
    if level == "sequence":
        log_BR = log_BR.sum(-1, keepdim=True).clamp(-20, 20).expand_as(log_BR)
    weights_BR = log_BR.exp()
    low, high = bounds
    inside_BR = (weights_BR >= low) & (weights_BR <= high)
    weights_BR = weights_BR.clamp(max=high) if low <= 0 else torch.where(inside_BR, weights_BR, 0.0)
    weights_BR = weights_BR * mask_BR
    if normalise:
        weights_BR = weights_BR / masked_mean(weights_BR, mask_BR).clamp(min=1e-8)
    return weights_BR


def rejection_mask(old_BR: Tensor, rollout_BR: Tensor, mask_BR: Tensor, level: str, bounds: Bounds) -> Tensor:
    """The mask restricted to low ≤ ratio ≤ high.

    Args:
        level: `token`; or a statistic that keeps or rejects the whole sequence: `sequence_mean` (geometric mean of the
            ratios), `sequence_sum` (their product), `sequence_max` (the ratio furthest from 1).
    """
    log_BR = log_ratio(old_BR, rollout_BR, mask_BR)
    if level == "token":
        statistic = log_BR
    elif level == "sequence_mean":
        statistic = log_BR.sum(-1, keepdim=True) / mask_BR.sum(-1, keepdim=True).clamp(min=1)
    elif level == "sequence_sum":
        statistic = log_BR.sum(-1, keepdim=True).clamp(-20, 20)
    elif level == "sequence_max":
        furthest_B1 = log_BR.abs().argmax(-1, keepdim=True)
        statistic = log_BR.gather(-1, furthest_B1)
    else:
        raise ValueError(f"unknown rejection level {level!r}")
    ratio = statistic.exp()
    return mask_BR * ((ratio >= bounds[0]) & (ratio <= bounds[1]))


def mismatch_metrics(old_BR: Tensor, rollout_BR: Tensor, mask_BR: Tensor) -> dict[str, float]:
    """KL k1 and k3 between rollout and trainer, maximum log-prob difference, perplexity gap, effective sample size.

    The effective sample size is (Σw)² / (N·Σw²) of the token ratios: 1 when they are all equal.
    """
    log_BR = log_ratio(old_BR, rollout_BR, mask_BR)
    ratio_BR = log_BR.exp() * mask_BR
    count = mask_BR.sum().clamp(min=1)
    return {
        "rollout_k1": masked_mean(-log_BR, mask_BR).item(),
        "rollout_k3": masked_mean(log_BR.exp() - 1 - log_BR, mask_BR).item(),
        "rollout_max_difference": log_BR.abs().max().item() if log_BR.numel() else 0.0,
        "perplexity_gap": (masked_mean(-old_BR, mask_BR).exp() - masked_mean(-rollout_BR, mask_BR).exp()).item(),
        "effective_sample_size": (ratio_BR.sum().square() / (count * ratio_BR.square().sum()).clamp(min=1e-8)).item(),
    }
