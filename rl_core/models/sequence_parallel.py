"""Ulysses sequence parallelism: the ranks of a group share each packed row and its attention heads.

Every rank holds an equal part of the row's tokens. Before attention, an all-to-all converts "part of the tokens, all
heads" [T/S, H, D] to "all tokens, part of the heads" [T, H/S, D]; after attention, another one converts it back
([2309.14509](https://arxiv.org/abs/2309.14509)).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Exchange(torch.autograd.Function):
    """All-to-all: sends part k of the first dimension to rank k; the backward pass reverses it."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()  # the all-to-all works on raw memory
        received = torch.empty_like(gradient)
        dist.all_to_all_single(received, gradient, group=ctx.group)
        return received, None


class _Gather(torch.autograd.Function):
    """Sums values [N] to which each rank contributes its own positions. The loss is the same on all ranks, so a rank's
    gradient is the full gradient at its own positions."""

    @staticmethod
    def forward(ctx: Any, values_N: Tensor, own_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(own_N)
        total_N = values_N.clone()
        dist.all_reduce(total_N, group=group)
        return total_N

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (own_N,) = ctx.saved_tensors
        return gradient * own_N, None, None


class SequenceParallel:
    """The group of `size` ranks that share a row, and this rank's index in it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def own(self, total: int) -> slice:
        """This rank's part of a row of `total` tokens, a multiple of `size`."""
        part = total // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def to_heads(self, x_THD: Tensor) -> Tensor:
        """Converts part of the tokens and all heads to all tokens and part of the heads."""
        tokens, heads, channels = x_THD.shape
        parts = x_THD.reshape(tokens, self.size, heads // self.size, channels).transpose(0, 1)
        received: Tensor = _Exchange.apply(parts.contiguous(), self.group)
        return received.flatten(0, 1)

    def to_tokens(self, x_THD: Tensor) -> Tensor:
        """Converts all tokens and part of the heads to part of the tokens and all heads."""
        tokens, heads, channels = x_THD.shape
        parts = x_THD.reshape(self.size, tokens // self.size, heads, channels)
        received: Tensor = _Exchange.apply(parts.contiguous(), self.group)
        return received.transpose(0, 1).flatten(1, 2)

    def gather(self, values_n: Tensor, own_N: Tensor) -> Tensor:
        """Values [N] of all ranks; this rank's values [n] belong to the positions where `own_N` is true."""
        values_N = torch.zeros(own_N.shape, dtype=values_n.dtype, device=values_n.device)
        gathered: Tensor = _Gather.apply(values_N.masked_scatter(own_N, values_n), own_N, self.group)
        return gathered
