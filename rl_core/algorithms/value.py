"""The critic's loss."""

import torch
from torch import Tensor


def clipped_value_loss(
    values_BR: Tensor, old_values_BR: Tensor, returns_BR: Tensor, cliprange: float
) -> tuple[Tensor, Tensor]:
    """½·max((v − return)², (v clipped around the old value − return)²) per token [B, R], and where the clip decides.

    Source: the reference implementation of arXiv 1707.06347; a value moves at most `cliprange` per update.
    """
    clipped_BR = old_values_BR + (values_BR - old_values_BR).clamp(-cliprange, cliprange)
    plain_BR, held_BR = (values_BR - returns_BR).square(), (clipped_BR - returns_BR).square()
    return 0.5 * torch.maximum(plain_BR, held_BR), (held_BR > plain_BR).float()
