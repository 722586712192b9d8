"""Micro-batches by token budget, and the way between the padded view [B, R] and packed rows.

Rows come as a batch with `prompts` [B, P] and `responses` [B, R] (both right-padded) and their lengths
`prompt_length`, `response_length` [B].
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.data.protocol import DataProto
from rl_core.models.attention import to_device
from rl_core.models.load import Packed
from rl_core.training.place import Place


def balanced_parts(lengths: list[int], parts: int) -> list[list[int]]:
    """Row indices in `parts` groups of about equal token sums: longest first, each into the emptiest group."""
    groups: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        # Empty groups come first, so that no group stays empty while there are rows for it.
        lightest = min(range(parts), key=lambda g: (loads[g], g))
        groups[lightest].append(index)
        loads[lightest] += lengths[index]
    return [sorted(group) for group in groups]


def split_by_tokens(lengths: list[int], max_tokens: int, device: torch.device | None = None) -> list[list[int]]:
    """Row indices in as few balanced groups as hold at most `max_tokens` each; the number is agreed by all ranks.

    Raises ValueError when one row alone is above the budget.
    """
    if max(lengths) > max_tokens:
        raise ValueError(f"a sequence of {max(lengths)} tokens does not fit in a micro-batch of {max_tokens}")
    parts = -(-sum(lengths) // max_tokens)
    while max(sum(lengths[i] for i in group) for group in balanced_parts(lengths, parts)) > max_tokens:
        parts += 1
    agreed = torch.tensor(parts)  # on the CPU also where there are GPUs, which need not wait for it
    if dist.is_initialized():
        # FSDP gathers weights in every forward, so ranks must run the same number of them.
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return balanced_parts(lengths, int(agreed))


class MicroBatch:
    """Some rows of a batch, on the device: packed, with the indices `target_N` of all response tokens in the packed
    row, and as `rows` their numbers per response token [B, R]."""

    def __init__(self, rows: DataProto, place: Place) -> None:
        prompts, responses = rows.batch["prompts"], rows.batch["responses"]
        prompt_length_B, length_B = rows.batch["prompt_length"], rows.batch["response_length"]
        place_R = torch.arange(responses.shape[1])
        real_BR = place_R < length_B[:, None]
        real = torch.cat([torch.arange(prompts.shape[1]) < prompt_length_B[:, None], real_BR], dim=1)
        total_B = prompt_length_B + length_B
        first_B = total_B.cumsum(0) - total_B + prompt_length_B
        ids_T = torch.cat([prompts, responses], dim=1)[real]
        self.packed = Packed(ids_T, total_B.tolist(), place.device, place.parallel)
        self.target_N = to_device((first_B[:, None] + place_R)[real_BR], place.device)
        self._real_BR = to_device(real_BR, place.device)
        # All that a loss reads, in one copy.
        read = {name: x.float() for name, x in rows.batch.items() if x.is_floating_point() and x.shape == real_BR.shape}
        columns = to_device(torch.stack([*read.values()]), place.device) if read else ()
        self.rows = DataProto(dict(zip(read, columns, strict=True)), rows.non_tensor_batch, rows.meta_info)

    def pad(self, values_N: Tensor) -> Tensor:
        """Values of the response tokens [N] as [B, R], 0 behind the end of a response."""
        padded_BR = torch.zeros(self._real_BR.shape, dtype=values_N.dtype, device=values_N.device)
        return padded_BR.masked_scatter(self._real_BR, values_N)


def micro_batches(rows: DataProto, max_tokens: int, place: Place) -> Iterator[tuple[list[int], MicroBatch]]:
    """The rows in micro-batches of at most `max_tokens` tokens, with each one's row indices."""
    lengths = (rows.batch["prompt_length"] + rows.batch["response_length"]).tolist()
    for indices in split_by_tokens(lengths, max_tokens):
        yield indices, MicroBatch(rows[indices], place)
