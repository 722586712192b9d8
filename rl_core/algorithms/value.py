"""Value loss of the critic."""

import torch
from torch import Tensor


def clipped_value_loss(
    values_BR: Tensor, old_values_BR: Tensor, returns_BR: Tensor, cliprange: float
) -> tuple[Tensor, Tensor]:
    """½·max((v − return)², (v_clipped − return)²) per token [B, R], and 1.0 where the clipped term is larger.

    v_clipped is v limited to the old value ± `cliprange`. Source: the reference implementation of arXiv 1707.06347.
    """
    limited_BR = old_values_BR + (values_BR - old_values_BR).clamp(-cliprange, cliprange)
    unclipped_BR, clipped_BR = (values_BR - returns_BR).square(), (limited_BR - returns_BR).square()
    return 0.5 * torch.maximum(unclipped_BR, clipped_BR), (clipped_BR > unclipped_BR).float()
