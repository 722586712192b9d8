"""Dispatch modes: how arguments of a call are distributed over the ranks, and how their results are combined.

Ranks that share sequences (sequence parallelism) are consecutive: rank // sequence_parallel_size is the index of the
data-parallel group, and all ranks of a group receive the same rows. For rollouts the same holds for the ranks of an
engine (tensor parallelism).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from rl_core.data.protocol import DataProto

Method = TypeVar("Method", bound=Callable[..., Any])


class Dispatch(Enum):
    """How arguments are distributed and results are combined; each value describes its mode."""

    ONE_TO_ALL = "same arguments to every rank; returns the list of results"
    RANK_ZERO = "rank 0 only; returns its result"
    DP_COMPUTE_PROTO = (
        "DataProto split over the data-parallel groups (padded if not divisible); returns the DataProto concatenated "
        "from the first rank of each group"
    )
    DP_COMPUTE_METRIC = (
        "DataProto split over the data-parallel groups (must be divisible); returns rank 0's result, equal on all ranks"
    )
    DP_UPDATE = (
        "DataProto split over the data-parallel groups (must be divisible); returns the DataProto concatenated from "
        "the first rank of each group, and rank 0's metrics, equal on all ranks"
    )
    ROLLOUT_COMPUTE_PROTO = (
        "DataProto split over the rollout engines (padded if not divisible); returns the DataProto concatenated from "
        "the first rank of each engine"
    )


@dataclass(frozen=True)
class Layout:
    """The ranks of a group: `sequence_parallel_size` consecutive ranks share sequences, and `tensor_parallel_size`
    consecutive ranks form a rollout engine."""

    world_size: int
    sequence_parallel_size: int = 1
    tensor_parallel_size: int = 1

    def sharing(self, mode: Dispatch) -> int:
        """Number of consecutive ranks that receive the same rows."""
        return self.tensor_parallel_size if mode is Dispatch.ROLLOUT_COMPUTE_PROTO else self.sequence_parallel_size

    def called(self, mode: Dispatch) -> range:
        """Ranks that run the method."""
        return range(1 if mode is Dispatch.RANK_ZERO else self.world_size)

    def answering(self, mode: Dispatch) -> range:
        """Ranks whose results are collected."""
        if mode in (Dispatch.RANK_ZERO, Dispatch.DP_COMPUTE_METRIC):
            return range(1)
        split = mode in (Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_UPDATE, Dispatch.ROLLOUT_COMPUTE_PROTO)
        return range(0, self.world_size, self.sharing(mode) if split else 1)


def register(dispatch_mode: Dispatch) -> Callable[[Method], Method]:
    """Marks a worker's method as callable on its group, with this dispatch mode."""

    def mark(method: Method) -> Method:
        method.dispatch_mode = dispatch_mode  # type: ignore[attr-defined]
        return method

    return mark


def split(mode: Dispatch, layout: Layout, args: tuple[Any, ...]) -> tuple[list[tuple[Any, ...]], int]:
    """Returns the positional arguments of each called rank, and the number of padding rows added."""
    world_size = layout.world_size
    if mode in (Dispatch.RANK_ZERO, Dispatch.ONE_TO_ALL):
        return [args] * len(layout.called(mode)), 0
    sharing = layout.sharing(mode)
    padding = 0
    columns = []
    for arg in args:
        if isinstance(arg, DataProto):
            if mode not in (Dispatch.DP_COMPUTE_METRIC, Dispatch.DP_UPDATE):
                arg, padding = arg.pad_to_divisor(world_size // sharing)
            columns.append([part for part in arg.chunk(world_size // sharing) for _ in range(sharing)])
        else:
            columns.append([arg] * world_size)
    return list(zip(*columns, strict=True)), padding


def collect(mode: Dispatch, results: list[Any], padding: int) -> Any:
    """Combines the results of the answering ranks into one."""
    if mode in (Dispatch.RANK_ZERO, Dispatch.DP_COMPUTE_METRIC):
        return results[0]
    if mode in (Dispatch.DP_COMPUTE_PROTO, Dispatch.ROLLOUT_COMPUTE_PROTO):
        return DataProto.concat(results).unpad(padding)
    if mode is Dispatch.DP_UPDATE:
        return DataProto.concat([rows for rows, _ in results]), results[0][1]
    return results
