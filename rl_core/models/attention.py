"""Causal attention over packed sequences, registered in transformers under the name `ATTENTION`.

Several sequences lie one behind the other in one row of T tokens; none sees its neighbour. CUDA uses torch's
varlen kernel. Elsewhere the tokens are laid out as [sequences, longest] for the fused causal kernel and laid back:
with right padding under a causal mask no real token ever attends to a padded one, so no mask of size T² exists.
With sequence parallelism each rank brings part of the tokens and computes part of the heads.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from rl_core.models.sequence_parallel import SequenceParallel

ATTENTION = "rollforward_packed"


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; a GPU's copy goes on beside its other work."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Layout(NamedTuple):
    """Where B packed sequences lie: `cu_seqlens` [B + 1] int32, `gather_BL` [B, L] index of each padded place into the
    packed row (0 on padding), `scatter_T` [T] index of each packed token into the flattened padded view, and the group
    of ranks that share the row, if there is one."""

    cu_seqlens: Tensor
    longest: int
    gather_BL: Tensor
    scatter_T: Tensor
    parallel: SequenceParallel | None


def layout_of(lengths: list[int], device: torch.device, parallel: SequenceParallel | None = None) -> Layout:
    """Layout of packed sequences with the given lengths (tokens, all positive)."""
    lengths_B = torch.tensor(lengths)
    starts_B = lengths_B.cumsum(0) - lengths_B
    longest = int(lengths_B.max())
    place_L = torch.arange(longest)
    real_BL = place_L < lengths_B[:, None]
    gather_BL = torch.where(real_BL, starts_B[:, None] + place_L, 0)
    cu_seqlens = F.pad(lengths_B.cumsum(0), (1, 0)).to(torch.int32)
    scatter_T = real_BL.flatten().nonzero().squeeze(1)
    cu_seqlens, gather_BL, scatter_T = (to_device(x, device) for x in (cu_seqlens, gather_BL, scatter_T))
    return Layout(cu_seqlens, longest, gather_BL, scatter_T, parallel)


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
    if layout.parallel is not None:
        query_THD, key_THD, value_THD = _exchanged(layout.parallel, query_THD, key_THD, value_THD)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        out_THD = _varlen(query_THD, key_THD, value_THD, layout, scaling)
    else:
        out_THD = _padded(query_THD, key_THD, value_THD, layout, scaling)
    if layout.parallel is not None:
        out_THD = layout.parallel.to_tokens(out_THD)
    return out_THD.unsqueeze(0), None


def _exchanged(parallel: SequenceParallel, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor) -> list[Tensor]:
    heads, kv_heads = query_THD.shape[1], key_THD.shape[1]
    if heads % parallel.size:
        raise ValueError(f"engine.sequence_parallel_size={parallel.size} must divide the model's {heads} heads")
    if kv_heads % parallel.size:
        # Fewer key/value heads than ranks: each query head gets a copy of its own.
        key_THD, value_THD = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key_THD, value_THD))
    return [parallel.to_heads(x) for x in (query_THD, key_THD, value_THD)]


def _varlen(query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, layout: Layout, scaling: float) -> Tensor:
    groups = query_THD.shape[1] // key_THD.shape[1]
    key_THD, value_THD = (x.repeat_interleave(groups, dim=1) for x in (key_THD, value_THD))
    cu, longest = layout.cu_seqlens, layout.longest
    out_THD: Tensor = varlen_attn(  # type: ignore[assignment]
        query_THD, key_THD, value_THD, cu, cu, longest, longest, scale=scaling, window_size=(-1, 0)
    )
    return out_THD


def _padded(query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, layout: Layout, scaling: float) -> Tensor:
    query_BHLD, key_BHLD, value_BHLD = (x[layout.gather_BL].transpose(1, 2) for x in (query_THD, key_THD, value_THD))
    out_BHLD = F.scaled_dot_product_attention(
        query_BHLD, key_BHLD, value_BHLD, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out_BHLD.transpose(1, 2).flatten(0, 1)[layout.scatter_T]


AttentionInterface.register(ATTENTION, packed_attention)
