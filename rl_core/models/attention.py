"""Causal attention over packed sequences, known to transformers under the name `ATTENTION` after `register_attention`.

Several sequences are concatenated into one row of T tokens and do not attend to each other. CUDA uses torch's varlen
kernel. Other devices scatter the tokens to [sequences, longest] for the fused causal kernel and gather them back: with
right padding and a causal mask no real token attends to padding, so no T × T mask is needed. With sequence parallelism,
each rank holds part of the tokens and computes part of the heads.
"""

import importlib
import sys
from functools import cache, cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_core.models.sequence_parallel import SequenceParallel

ATTENTION = "rollforward_packed"


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; copies to a GPU are asynchronous."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Shared(NamedTuple):
    """Prefixes shared by B sequences: the first `length_B` tokens of each are those of sequence `first_B`, which is
    the sequence itself or an earlier one that shares nothing."""

    first_B: Tensor
    length_B: Tensor


class Row(NamedTuple):
    """The K tokens of a row that holds shared prefixes once, out of T tokens of all sequences: their indices `kept_K`
    among all tokens, and the index `place_T` in the row of every token."""

    kept_K: Tensor
    place_T: Tensor

    def extended(self, count: int) -> "Row":
        """The row followed by `count` more tokens that are not shared."""
        more = torch.arange(count)
        return Row(
            torch.cat([self.kept_K, len(self.place_T) + more]), torch.cat([self.place_T, len(self.kept_K) + more])
        )

    def to(self, device: torch.device) -> "Row":
        """The row on the device."""
        return Row(*(to_device(x, device) for x in self))


def row_of(lengths: list[int], shared: Shared) -> Row:
    """The row of these sequences in which each shared prefix is computed once."""
    length_B = torch.tensor(lengths)
    start_B, sequence_T = length_B.cumsum(0) - length_B, torch.arange(len(lengths)).repeat_interleave(length_B)
    index_T = torch.arange(len(sequence_T))
    position_T = index_T - start_B[sequence_T]
    in_prefix_T = position_T < shared.length_B[sequence_T]
    source_T = torch.where(in_prefix_T, start_B[shared.first_B[sequence_T]] + position_T, index_T)
    is_kept_T = source_T == index_T
    return Row(is_kept_T.nonzero().squeeze(1), (is_kept_T.cumsum(0) - 1)[source_T])


class Layout:
    """Layout of B packed sequences: `cu_seqlens` [B + 1] int32 on the device, length of the longest sequence in tokens,
    the group of ranks that share the row, if any, and the row's tokens if sequences share prefixes in it."""

    def __init__(
        self,
        lengths: list[int],
        device: torch.device,
        parallel: SequenceParallel | None = None,
        row: Row | None = None,
    ) -> None:
        """`lengths` are the sequence lengths in tokens, all positive."""
        cu_seqlens = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
        self.cu_seqlens, self.longest, self.parallel = to_device(cu_seqlens, device), max(lengths), parallel
        self.row = row and row.to(device)

    def in_row(self, index: Tensor) -> Tensor:
        """Indices in the row of tokens given by their indices among all tokens."""
        return self.row.place_T[index] if self.row else index

    @cached_property
    def _padded(self) -> tuple[Tensor, Tensor]:
        """Indices [B, longest] of the padded view's positions in the packed row (0 on padding), and indices [K] of the
        packed tokens in the flattened padded view."""
        starts_B, length_B = self.cu_seqlens[:-1].long(), self.cu_seqlens.diff()
        position_L = torch.arange(self.longest, device=starts_B.device)
        real_BL = position_L < length_B[:, None]
        gather_BL = self.in_row(torch.where(real_BL, starts_B[:, None] + position_L, 0))
        scatter_T = real_BL.flatten().nonzero().squeeze(1)
        return gather_BL, scatter_T[self.row.kept_K] if self.row else scatter_T

    def pad(self, values_K: Tensor) -> Tensor:
        """Values [K, ...] of the row's tokens as [B, longest, ...], right-padded with those of the first token."""
        gather_BL, _ = self._padded
        # Not `values_K[gather_BL]`: its gradient adds rows that are gathered several times in any order if there are
        # threads.
        flat: Tensor = values_K.index_select(0, gather_BL.flatten())
        return flat.view(*gather_BL.shape, *values_K.shape[1:])

    def unpad(self, values_BL: Tensor) -> Tensor:
        """The inverse of `pad`: values [B, longest, ...] as [K, ...]."""
        values_K: Tensor = values_BL.flatten(0, 1)[self._padded[1]]
        return values_K

    def visible(self, window: int | None) -> Tensor:
        """Mask [longest, longest] of the tokens that a token attends to: itself and those before it in the window."""
        position_L = torch.arange(self.longest, device=self.cu_seqlens.device)
        distance_LL = position_L[:, None] - position_L
        return (distance_LL >= 0) & (distance_LL < (self.longest if window is None else window))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    layout: Layout,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention over one packed row: query [1, heads, T, D], key and value [1, kv heads, T, D] → [1, T, heads, D].

    A token attends to itself and the `sliding_window` − 1 tokens before it. Scores are limited to ±`softcap` by a tanh;
    `s_aux` [heads] are the scores of sinks, which take part in the softmax and have no value. Raises ValueError for
    sinks with sequence parallelism, which is not supported.
    """
    if s_aux is not None and layout.parallel is not None:
        raise ValueError("attention sinks are not supported with fsdp.sequence_parallel_size above 1")
    window = sliding_window if sliding_window is not None and sliding_window < layout.longest else None
    query_THD, key_THD, value_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    if layout.parallel is not None:
        query_THD, key_THD, value_THD = _exchanged(layout.parallel, query_THD, key_THD, value_THD)
    if softcap is not None or s_aux is not None:
        out_THD = _explicit(query_THD, key_THD, value_THD, layout, scaling, window, softcap, s_aux)
    elif query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        out_THD = _varlen(query_THD, key_THD, value_THD, layout, scaling, window)
    else:
        out_THD = _padded(query_THD, key_THD, value_THD, layout, scaling, window)
    if layout.parallel is not None:
        out_THD = layout.parallel.to_tokens(out_THD)
    return out_THD.unsqueeze(0), None


def _exchanged(parallel: SequenceParallel, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor) -> list[Tensor]:
    heads, kv_heads = query_THD.shape[1], key_THD.shape[1]
    if heads % parallel.size:
        raise ValueError(f"fsdp.sequence_parallel_size={parallel.size} must divide the model's {heads} heads")
    if kv_heads % parallel.size:
        # Key/value heads do not divide by the ranks: give each query head its own copy.
        key_THD, value_THD = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key_THD, value_THD))
    return [parallel.to_heads(x) for x in (query_THD, key_THD, value_THD)]


def _varlen(
    query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, layout: Layout, scaling: float, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # imports torch's compiler, which takes a second

    groups = query_THD.shape[1] // key_THD.shape[1]
    key_THD, value_THD = (x.repeat_interleave(groups, dim=1) for x in (key_THD, value_THD))
    cu, longest = layout.cu_seqlens, layout.longest
    before = -1 if window is None else window - 1
    out_THD: Tensor = varlen_attn(  # type: ignore[assignment]
        query_THD, key_THD, value_THD, cu, cu, longest, longest, scale=scaling, window_size=(before, 0)
    )
    return out_THD


def _padded(
    query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, layout: Layout, scaling: float, window: int | None
) -> Tensor:
    query_BHLD, key_BHLD, value_BHLD = (layout.pad(x).transpose(1, 2) for x in (query_THD, key_THD, value_THD))
    visible_LL = None if window is None else layout.visible(window)
    out_BHLD = F.scaled_dot_product_attention(
        query_BHLD,
        key_BHLD,
        value_BHLD,
        attn_mask=visible_LL,
        is_causal=visible_LL is None,
        scale=scaling,
        enable_gqa=True,
    )
    return layout.unpad(out_BHLD.transpose(1, 2))


def _explicit(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    layout: Layout,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention with [B, heads, longest, longest] scores in memory, for what no fused kernel computes."""
    groups = query_THD.shape[1] // key_THD.shape[1]
    key_THD, value_THD = (x.repeat_interleave(groups, dim=1) for x in (key_THD, value_THD))
    query_BHLD, key_BHLD, value_BHLD = (layout.pad(x).transpose(1, 2) for x in (query_THD, key_THD, value_THD))
    scores_BHLL = query_BHLD @ key_BHLD.transpose(2, 3) * scaling
    if softcap is not None:
        scores_BHLL = torch.tanh(scores_BHLL / softcap) * softcap
    scores_BHLL = scores_BHLL.masked_fill(~layout.visible(window), torch.finfo(scores_BHLL.dtype).min)
    if sinks_H is not None:
        sinks_BHL1 = sinks_H.reshape(1, -1, 1, 1).expand(*scores_BHLL.shape[:3], 1)
        scores_BHLL = torch.cat([scores_BHLL, sinks_BHL1], dim=-1)
    weights_BHLL = scores_BHLL.softmax(-1, dtype=torch.float32).to(query_THD.dtype)[..., : layout.longest]
    return layout.unpad((weights_BHLL @ value_BHLD).transpose(1, 2))


@cache
def import_model_code() -> None:
    """Imports the model code of transformers without scikit-learn, which takes another second and which only assisted
    generation uses; other code of this process can import it afterwards."""
    blocked = "sklearn" not in sys.modules
    if blocked:
        sys.modules["sklearn"] = None  # type: ignore[assignment]  # Python's own way to forbid an import
    try:
        importlib.import_module("transformers.generation.candidate_generator")
    finally:
        if blocked:
            del sys.modules["sklearn"]


@cache
def register_attention() -> None:
    """Makes `packed_attention` known to transformers; imports its model code, which takes seconds."""
    import_model_code()
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)
