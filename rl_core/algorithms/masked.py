"""Means over masked tokens, whitening, and aggregation of per-token losses into a scalar."""

import torch
from torch import Tensor


def masked_mean(values_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Mean over the tokens where the mask is 1; 0 for an empty mask."""
    return (values_BR * mask_BR).sum() / mask_BR.sum().clamp(min=1)


def whiten(values_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """(values − masked mean) / sqrt(masked unbiased variance + 1e-8), over the whole batch."""
    mean = masked_mean(values_BR, mask_BR)
    count = mask_BR.sum()
    variance = (((values_BR - mean) ** 2) * mask_BR).sum() / (count - 1).clamp(min=1)
    return (values_BR - mean) * torch.rsqrt(variance + 1e-8)


def aggregate_loss(
    loss_BR: Tensor, mask_BR: Tensor, mode: str, tokens: float, sequences: float, scale: float = 1.0
) -> Tensor:
    """Contribution of these rows [B, R] to the mini-batch's loss.

    Args:
        mode: `token-mean`: sum / tokens; `token-sum`: sum; `seq-mean-token-sum`: sum / sequences;
            `seq-mean-token-sum-norm`: sum / sequences / scale; `seq-mean-token-mean`: mean of the rows' token means.
        tokens, sequences: counts of the whole mini-batch over all micro-batches and ranks, so that the contributions
            add up to the same loss for every split.
        scale: a constant, such as the response budget (Dr. GRPO).
    """
    summed_B = (loss_BR * mask_BR).sum(-1)
    if mode == "token-mean":
        return summed_B.sum() / max(tokens, 1.0)
    if mode == "token-sum":
        return summed_B.sum()
    if mode == "seq-mean-token-sum":
        return summed_B.sum() / max(sequences, 1.0)
    if mode == "seq-mean-token-sum-norm":
        return summed_B.sum() / max(sequences, 1.0) / scale
    if mode == "seq-mean-token-mean":
        return (summed_B / mask_BR.sum(-1).clamp(min=1)).sum() / max(sequences, 1.0)
    raise ValueError(f"unknown loss_agg_mode {mode!r}")
