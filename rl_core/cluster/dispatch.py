"""How one call on the driver becomes calls on the ranks, and their results one result.

Ranks that share each sequence (sequence parallelism) follow each other: rank // sequence_parallel_size is the index of
a rank's data-parallel group, and all ranks of a group get the same rows. So do the ranks of a rollout engine (tensor
parallelism) when responses are sampled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from rl_core.data.protocol import DataProto

Method = TypeVar("Method", bound=Callable[..., Any])


class Dispatch(Enum):
    """How arguments go to the ranks and results come back."""

    ONE_TO_ALL = "the same arguments to every rank; a list of the results"
    RANK_ZERO = "rank 0 only; its result"
    DP_COMPUTE_PROTO = (
        "DataProto split over the data-parallel groups (padded when it does not divide); DataProto joined again from "
        "the first rank of each group"
    )
    DP_COMPUTE_METRIC = (
        "DataProto split over the data-parallel groups (must divide); rank 0's result, which all ranks share"
    )
    ROLLOUT_COMPUTE_PROTO = (
        "DataProto split over the rollout engines (padded when it does not divide); DataProto joined again from the "
        "first rank of each engine"
    )


@dataclass(frozen=True)
class Layout:
    """The ranks of a group: `world_size` of them, each `sequence_parallel_size` in a row sharing their sequences, and
    each `tensor_parallel_size` in a row a rollout engine."""

    world_size: int
    sequence_parallel_size: int = 1
    tensor_parallel_size: int = 1

    def sharing(self, mode: Dispatch) -> int:
        """How many ranks in a row get the same rows."""
        return self.tensor_parallel_size if mode is Dispatch.ROLLOUT_COMPUTE_PROTO else self.sequence_parallel_size

    def called(self, mode: Dispatch) -> range:
        """The ranks that run the method."""
        return range(1 if mode is Dispatch.RANK_ZERO else self.world_size)

    def answering(self, mode: Dispatch) -> range:
        """The ranks whose results are collected."""
        if mode in (Dispatch.RANK_ZERO, Dispatch.DP_COMPUTE_METRIC):
            return range(1)
        split = mode in (Dispatch.DP_COMPUTE_PROTO, Dispatch.ROLLOUT_COMPUTE_PROTO)
        return range(0, self.world_size, self.sharing(mode) if split else 1)


def register(dispatch_mode: Dispatch) -> Callable[[Method], Method]:
    """Marks a worker's method as callable on its group."""

    def mark(method: Method) -> Method:
        method.dispatch_mode = dispatch_mode  # type: ignore[attr-defined]
        return method

    return mark


def split(mode: Dispatch, layout: Layout, args: tuple[Any, ...]) -> tuple[list[tuple[Any, ...]], int]:
    """The positional arguments of each rank that is called, and the rows of padding that were added."""
    world_size = layout.world_size
    if mode in (Dispatch.RANK_ZERO, Dispatch.ONE_TO_ALL):
        return [args] * len(layout.called(mode)), 0
    sharing = layout.sharing(mode)
    padding = 0
    columns = []
    for arg in args:
        if isinstance(arg, DataProto):
            if mode is not Dispatch.DP_COMPUTE_METRIC:
                arg, padding = arg.pad_to_divisor(world_size // sharing)
            columns.append([part for part in arg.chunk(world_size // sharing) for _ in range(sharing)])
        else:
            columns.append([arg] * world_size)
    return list(zip(*columns, strict=True)), padding


def collect(mode: Dispatch, results: list[Any], padding: int) -> Any:
    """The driver's one result of the answering ranks' results."""
    if mode in (Dispatch.RANK_ZERO, Dispatch.DP_COMPUTE_METRIC):
        return results[0]
    if mode in (Dispatch.DP_COMPUTE_PROTO, Dispatch.ROLLOUT_COMPUTE_PROTO):
        return DataProto.concat(results).unpad(padding)
    return results
