"""Key/value cache of the transformers engine, used by the model through the attention function `CACHED`.

Row b of the cache belongs to sequence b, and column j to its token j, whatever else is decoded: a sequence's numbers do
not depend on where the others are. One forward computes N tokens that continue cached sequences, followed by whole
sequences packed as in training (rl_core/models/attention.py).
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_core.models.attention import Layout, packed_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHED = "rollforward_cached"
COLUMNS = 16
"""The cache grows by this number of columns; a multiple of the widths of vector units, so that sums over a row's
columns are formed in the same order with more of them."""


class KeyValueCache:
    """Keys and values [rows, kv heads, columns, D] of each layer, contiguous: on a CPU, reading parts of longer rows
    takes two to three times as long."""

    def __init__(self) -> None:
        self.rows = self.columns = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._spare: list[Tensor] = []

    @property
    def bytes_per_token(self) -> int:
        """Memory of a token's keys and values; 0 before the first token."""
        return sum(part[0, :, 0].nbytes for pair in self._layers.values() for part in pair)

    def reserve(self, used: int, rows: int, columns: int) -> None:
        """Makes room for `rows` sequences of at most `columns` tokens; keeps the content of the first `used` rows."""
        columns = -(-columns // COLUMNS) * COLUMNS
        if rows <= self.rows and (columns == self.columns or (used and columns < self.columns)):
            return
        # Exactly what is needed: fewer but longer sequences, or more but shorter ones, must not take more memory.
        self.rows, self.columns = rows, columns
        for layer, pair in self._layers.items():
            self._layers[layer] = (self._resized(pair[0], used), self._resized(pair[1], used))

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's keys and values; allocated at first use for such keys and values [1, kv heads, T, D]."""
        if index not in self._layers:
            self._layers[index] = (self._empty(key), self._empty(value))
        return self._layers[index]

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """Copies a row to another."""
        for pair in self._layers.values():
            for part in pair:
                part[target] = part[source]

    def _empty(self, like: Tensor) -> Tensor:
        """Cells for keys or values of this shape, in memory no longer used if it suffices."""
        shape = (self.rows, like.shape[1], self.columns, like.shape[3])
        size = math.prod(shape)
        for spare in self._spare:
            if spare.numel() >= size and spare.dtype == like.dtype:
                self._spare.remove(spare)
                return spare[:size].view(shape)
        # Zeros, because 0 · NaN from uninitialised memory would survive the mask.
        return like.new_zeros(size).view(shape)

    def _resized(self, old: Tensor, used: int) -> Tensor:
        new = self._empty(old)
        if used:
            count = min(old.shape[2], new.shape[2])
            new[:used, :, :count] = old[:used, :, :count]
        self._spare = [_memory(old)]
        return new


def _memory(view: Tensor) -> Tensor:
    """All memory behind a view, flat."""
    return view.as_strided((view.untyped_storage().nbytes() // view.itemsize,), (1,), 0)


@dataclass
class CachedLayout:
    """Layout of one forward over T tokens: the first N continue rows 0 … N − 1, the others are whole sequences.

    `rows_W`, `columns_W` are the cells into which tokens `tokens_W` (None: all in order) are written: a sequence may
    be written into several rows.
    """

    cache: KeyValueCache
    position_N: Tensor
    rows_W: Tensor
    columns_W: Tensor
    tokens_W: Tensor | None
    fresh: Layout | None

    def __post_init__(self) -> None:
        self.count = len(self.position_N)
        self._cells: dict[int, Tensor] = {}
        self._masks: dict[int | None, Tensor] = {}

    def cells(self, kv_heads: int) -> Tensor:
        """Indices of the written cells [W · kv heads] in the flattened cache."""
        if kv_heads not in self._cells:
            head_K = torch.arange(kv_heads, device=self.rows_W.device)
            cell_WK = (self.rows_W[:, None] * kv_heads + head_K) * self.cache.columns + self.columns_W[:, None]
            self._cells[kv_heads] = cell_WK.flatten()
        return self._cells[kv_heads]

    def hidden(self, window: int | None) -> Tensor:
        """Whether each column is invisible to the new token of each row [N, 1, 1, columns]."""
        if window not in self._masks:
            column = torch.arange(self.cache.columns, device=self.position_N.device)
            hidden_NL = column > self.position_N[:, None]
            if window is not None:
                hidden_NL |= column <= self.position_N[:, None] - window
            self._masks[window] = hidden_NL[:, None, None]
        return self._masks[window]


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    layout: CachedLayout,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one row of tokens: query [1, heads, T, D], key and value [1, kv heads, T, D] → [1, T, heads, D]."""
    keys, values = layout.cache.layer(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    for new, cached in ((key, keys), (value, values)):
        new_TKD = new[0].transpose(0, 1)
        new_WKD = new_TKD if layout.tokens_W is None else new_TKD[layout.tokens_W]
        cells = layout.cells(cached.shape[1])
        cached.view(-1, cached.shape[3]).index_copy_(0, cells, new_WKD.reshape(-1, cached.shape[3]))
    count, parts = layout.count, []
    if count:
        parts.append(_continued(query[0, :, :count], keys, values, scaling, layout, **options))
    if layout.fresh is not None:
        query, key, value = (x[:, :, count:] for x in (query, key, value))
        whole, _ = packed_attention(module, query, key, value, attention_mask, scaling, layout.fresh, **options)
        parts.append(whole)
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)), None


def _continued(
    query_HND: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    layout: CachedLayout,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> Tensor:
    """Attention of the first N tokens over their own rows of the cache [1, N, heads, D]."""
    count, kv_heads = layout.count, keys.shape[1]
    keys_NKLD, values_NKLD = (part[:count] for part in (keys, values))
    query_NKGD = query_HND.transpose(0, 1).reshape(count, kv_heads, -1, query_HND.shape[-1])
    score_NKGL = (query_NKGD @ keys_NKLD.transpose(2, 3)).float() * scaling
    if softcap is not None:
        score_NKGL = softcap * torch.tanh(score_NKGL / softcap)
    score_NKGL = score_NKGL.masked_fill_(layout.hidden(sliding_window), -torch.inf)
    if s_aux is not None:  # an attention sink: one more column, without a value
        sink_NKG1 = s_aux.float().view(1, kv_heads, -1, 1).expand(count, -1, -1, 1)
        score_NKGL = torch.cat([score_NKGL, sink_NKG1], -1)
    weight_NKGL = score_NKGL.softmax(-1)[..., : keys.shape[2]].to(values.dtype)
    return (weight_NKGL @ values_NKLD).reshape(1, count, -1, values.shape[-1])


def attend_with_cache(model: "PreTrainedModel") -> None:
    """Makes the model's attention read and fill a `KeyValueCache`."""
    from transformers import AttentionInterface

    AttentionInterface.register(CACHED, cached_attention)
    model.set_attn_implementation(CACHED)
