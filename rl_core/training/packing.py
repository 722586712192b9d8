"""Micro-batches by token budget, and conversion between the padded view [B, R] and packed rows.

Input batches have `prompts` [B, P] and `responses` [B, R] (both right-padded) and their lengths `prompt_length`,
`response_length` [B].
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.data.balance import balanced_parts
from rl_core.data.protocol import DataProto
from rl_core.errors import InputError
from rl_core.models.attention import Shared, to_device
from rl_core.models.load import Packed
from rl_core.training.mesh import RankMesh


def split_by_tokens(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Row indices in as few balanced groups of at most `max_tokens` tokens as possible, heaviest first.

    Collective over all ranks, which have the same number of rows and get the same number of groups. Raises InputError
    on all ranks if any rank has a row above the budget.
    """
    longest = max(lengths)
    groups = _within_budget(lengths, max_tokens) if longest <= max_tokens else []
    # FSDP gathers weights in every forward pass, so all ranks must run the same number of them, or none.
    maxima = torch.tensor([len(groups), longest])  # on the CPU, to avoid a device sync
    if dist.is_initialized():
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    agreed, longest = maxima.tolist()
    if longest > max_tokens:
        raise InputError(
            f"sequences of at most {max_tokens} tokens, the budget of a micro-batch",
            f"a sequence of {longest} tokens",
            "actor.max_tokens_per_micro_batch",
            f"set actor.max_tokens_per_micro_batch={longest}, or lower data.max_prompt_length or "
            "data.max_response_length",
        )
    while len(groups) < agreed:
        # Split the heaviest group: a new partition could exceed the budget although it has more groups.
        heaviest = max((group for group in groups if len(group) > 1), key=lambda group: _sum(lengths, group))
        groups.remove(heaviest)
        halves = balanced_parts([lengths[row] for row in heaviest], 2)
        groups += [[heaviest[i] for i in half] for half in halves]
    return sorted(groups, key=lambda group: (-_sum(lengths, group), group))


def _within_budget(lengths: list[int], max_tokens: int) -> list[list[int]]:
    parts = -(-sum(lengths) // max_tokens)
    while True:
        groups = balanced_parts(lengths, parts)
        if _sum(lengths, groups[0]) <= max_tokens:
            return groups
        parts += 1


def _sum(lengths: list[int], rows: list[int]) -> int:
    return sum(lengths[row] for row in rows)


class MicroBatch:
    """Rows of a batch on the device: `packed` tokens, the indices `target_N` of all response tokens in the packed row,
    and `rows` with the float columns of shape [B, R]."""

    def __init__(self, rows: DataProto, rank_mesh: RankMesh) -> None:
        prompts, responses = rows.batch["prompts"], rows.batch["responses"]
        prompt_length_B, length_B = rows.batch["prompt_length"], rows.batch["response_length"]
        position_R = torch.arange(responses.shape[1])
        real_BR = position_R < length_B[:, None]
        real = torch.cat([torch.arange(prompts.shape[1]) < prompt_length_B[:, None], real_BR], dim=1)
        total_B = prompt_length_B + length_B
        first_B = total_B.cumsum(0) - total_B + prompt_length_B
        ids_T = torch.cat([prompts, responses], dim=1)[real]
        shared = shared_prompts(prompts, prompt_length_B) if rank_mesh.device.type == "cpu" else None
        self.packed = Packed(ids_T, total_B.tolist(), rank_mesh.device, rank_mesh.parallel, shared)
        self.target_N = to_device((first_B[:, None] + position_R)[real_BR], rank_mesh.device)
        self._real_BR = to_device(real_BR, rank_mesh.device)
        # Move all columns that a loss reads in a single copy.
        used = {name: x.float() for name, x in rows.batch.items() if x.is_floating_point() and x.shape == real_BR.shape}
        columns = to_device(torch.stack([*used.values()]), rank_mesh.device) if used else ()
        self.rows = DataProto(dict(zip(used, columns, strict=True)), rows.non_tensor_batch)

    def pad(self, values_N: Tensor) -> Tensor:
        """Values of the response tokens [N] as [B, R], 0 after the end of a response."""
        padded_BR = torch.zeros(self._real_BR.shape, dtype=values_N.dtype, device=values_N.device)
        return padded_BR.masked_scatter(self._real_BR, values_N)


def shared_prompts(prompts: Tensor, length_B: Tensor) -> Shared | None:
    """Rows [B, P] of equal prompts as shared prefixes; None if all differ."""
    first: dict[bytes, int] = {}
    pairs = zip(prompts.numpy(), length_B.tolist(), strict=True)
    first_B = [first.setdefault(prompt[:length].tobytes(), row) for row, (prompt, length) in enumerate(pairs)]
    return Shared(torch.tensor(first_B), length_B) if len(first) < len(prompts) else None


def micro_batches(rows: DataProto, max_tokens: int, rank_mesh: RankMesh) -> Iterator[tuple[list[int], MicroBatch]]:
    """Yields micro-batches of at most `max_tokens` tokens with their row indices."""
    lengths = (rows.batch["prompt_length"] + rows.batch["response_length"]).tolist()
    for indices in split_by_tokens(lengths, max_tokens):
        yield indices, MicroBatch(rows[indices], rank_mesh)
