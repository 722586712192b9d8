"""How one call on the driver becomes calls on the ranks, and their results one result."""

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

from rl_core.data.protocol import DataProto

Method = TypeVar("Method", bound=Callable[..., Any])


class Dispatch(Enum):
    """How arguments go to the ranks and results come back."""

    ONE_TO_ALL = "the same arguments to every rank; a list of the results"
    RANK_ZERO = "rank 0 only; its result"
    ALL_TO_ALL = "lists with one entry a rank; a list of the results"
    DP_COMPUTE_PROTO = "DataProto split over the ranks (padded when it does not divide); DataProto joined again"
    DP_COMPUTE_METRIC = "DataProto split over the ranks (must divide); rank 0's result, which all ranks share"


def register(dispatch_mode: Dispatch) -> Callable[[Method], Method]:
    """Marks a worker's method as callable on its group."""

    def mark(method: Method) -> Method:
        method.dispatch_mode = dispatch_mode  # type: ignore[attr-defined]
        return method

    return mark


def split(mode: Dispatch, world_size: int, args: tuple[Any, ...]) -> tuple[list[tuple[Any, ...]], int]:
    """The positional arguments of each rank that is called, and the rows of padding that were added."""
    if mode is Dispatch.RANK_ZERO:
        return [args], 0
    if mode is Dispatch.ONE_TO_ALL:
        return [args] * world_size, 0
    if mode is Dispatch.ALL_TO_ALL:
        if any(len(arg) != world_size for arg in args):
            raise ValueError(f"lists of {[len(arg) for arg in args]} entries for {world_size} ranks")
        return list(zip(*args, strict=True)), 0
    padding = 0
    columns = []
    for arg in args:
        if isinstance(arg, DataProto):
            if mode is Dispatch.DP_COMPUTE_PROTO:
                arg, padding = arg.pad_to_divisor(world_size)
            columns.append(arg.chunk(world_size))
        else:
            columns.append([arg] * world_size)
    return list(zip(*columns, strict=True)), padding


def collect(mode: Dispatch, results: list[Any], padding: int) -> Any:
    """The driver's one result of the ranks' results."""
    if mode in (Dispatch.RANK_ZERO, Dispatch.DP_COMPUTE_METRIC):
        return results[0]
    if mode is Dispatch.DP_COMPUTE_PROTO:
        return DataProto.concat(results).unpad(padding)
    return results
