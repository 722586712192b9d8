"""Policy losses per token, to be minimised; aggregation is a separate step."""

import torch
from torch import Tensor


def ppo_clip(
    log_prob_BR: Tensor, old_log_prob_BR: Tensor, advantage_BR: Tensor, low: float, high: float, dual: float
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's clipped surrogate with the dual clip; returns (loss, clipped, dual-clipped), each [B, R].

    Sources: arXiv 1707.06347, equation 7; dual clip arXiv 1912.09729, equation 5 (ratio at most `dual` where the
    advantage is negative). The ratio is exp(log_prob − old_log_prob) with the exponent held within ±20.
    """
    ratio_BR = (log_prob_BR - old_log_prob_BR).clamp(-20, 20).exp()
    plain_BR = -advantage_BR * ratio_BR
    clipped_BR = -advantage_BR * ratio_BR.clamp(1 - low, 1 + high)
    pessimistic_BR = torch.maximum(plain_BR, clipped_BR)
    bound_BR = -advantage_BR * dual
    negative_BR = advantage_BR < 0
    loss_BR = torch.where(negative_BR, torch.minimum(pessimistic_BR, bound_BR), pessimistic_BR)
    is_clipped_BR = (clipped_BR > plain_BR).float()
    is_dual_BR = (negative_BR & (pessimistic_BR > bound_BR)).float()
    return loss_BR, is_clipped_BR, is_dual_BR
