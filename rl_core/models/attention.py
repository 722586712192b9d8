"""Causal attention over packed sequences, registered in transformers under the name `ATTENTION`.

Several sequences lie one behind the other in one row of T tokens; none sees its neighbour. CUDA uses torch's
varlen kernel. Elsewhere the tokens are laid out as [sequences, longest] for the fused causal kernel and laid back:
with right padding under a causal mask no real token ever attends to a padded one, so no mask of size T² exists.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "rollforward_packed"


class Layout(NamedTuple):
    """Where B packed sequences lie: `cu_seqlens` [B + 1] int32, `gather_BL` [B, L] index of each padded place into the
    packed row (0 on padding), `scatter_T` [T] index of each packed token into the flattened padded view."""

    cu_seqlens: Tensor
    longest: int
    gather_BL: Tensor
    scatter_T: Tensor


def layout_of(lengths: list[int], device: torch.device) -> Layout:
    """Layout of packed sequences with the given lengths (tokens, all positive)."""
    lengths_B = torch.tensor(lengths)
    starts_B = lengths_B.cumsum(0) - lengths_B
    longest = int(lengths_B.max())
    place_L = torch.arange(longest)
    real_BL = place_L < lengths_B[:, None]
    gather_BL = torch.where(real_BL, starts_B[:, None] + place_L, 0)
    cu_seqlens = F.pad(lengths_B.cumsum(0), (1, 0)).to(torch.int32)
    scatter_T = real_BL.flatten().nonzero().squeeze(1)
    return Layout(cu_seqlens.to(device), longest, gather_BL.to(device), scatter_T.to(device))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    layout: Layout,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of one packed row: query [1, heads, T, D], key and value [1, kv heads, T, D] → [1, T, heads, D].

    Raises ValueError for a sliding window shorter than the longest sequence, which is not computed here.
    """
    if sliding_window is not None and sliding_window < layout.longest:
        raise ValueError(f"sliding-window attention ({sliding_window}) is shorter than a sequence ({layout.longest})")
    query_THD, key_THD, value_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn

        groups = query_THD.shape[1] // key_THD.shape[1]
        key_THD, value_THD = (x.repeat_interleave(groups, dim=1) for x in (key_THD, value_THD))
        cu, longest = layout.cu_seqlens, layout.longest
        out_THD: Tensor = varlen_attn(  # type: ignore[assignment]
            query_THD, key_THD, value_THD, cu, cu, longest, longest, scale=scaling, window_size=(-1, 0)
        )
        return out_THD.unsqueeze(0), None
    query_BHLD, key_BHLD, value_BHLD = (x[layout.gather_BL].transpose(1, 2) for x in (query_THD, key_THD, value_THD))
    out_BHLD = F.scaled_dot_product_attention(
        query_BHLD, key_BHLD, value_BHLD, is_causal=True, scale=scaling, enable_gqa=True
    )
    out_THD = out_BHLD.transpose(1, 2).flatten(0, 1)[layout.scatter_T]
    return out_THD.unsqueeze(0), None


AttentionInterface.register(ATTENTION, packed_attention)
