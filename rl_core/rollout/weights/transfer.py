"""Weight transfer from trainer to rollout engines: flat buckets of whole tensors, and their broadcast."""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

BUCKET_BYTES = 64 * 2**20
ALIGNMENT = 16
"""Bytes; kernels read aligned tensors faster, and views of another dtype require it."""

Layout = list[tuple[str, str, list[int]]]
"""Name, dtype and shape of each tensor of a bucket, in order."""


@dataclass
class Bucket:
    """Concatenated tensors in `data` [bytes] uint8, each aligned to a multiple of `ALIGNMENT`.

    Ray transfers it through shared memory without copying the data, which is then read-only.
    """

    layout: Layout
    data: Tensor

    def __getstate__(self) -> dict[str, Any]:
        return {"layout": self.layout, "data": self.data.cpu().numpy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.layout = state["layout"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the read-only data is never written to
            self.data = torch.from_numpy(state["data"])


def buckets(tensors: Iterable[tuple[str, Tensor]], size: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Named tensors of one device as buckets of at most `size` bytes; a larger tensor gets a separate bucket."""
    group: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in tensors:
        if group and filled + tensor.nbytes > size:
            yield _packed(group)
            group, filled = [], 0
        group.append((name, tensor))
        filled += _aligned(tensor.nbytes)
    if group:
        yield _packed(group)


def unpack(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The bucket's named tensors, which share its memory."""
    for (name, _, _), view in zip(bucket.layout, _views(bucket.layout, bucket.data), strict=True):
        yield name, view


def _packed(group: list[tuple[str, Tensor]]) -> Bucket:
    layout = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in group]
    data = torch.empty(_bytes(layout), dtype=torch.uint8, device=group[0][1].device)
    for (_, tensor), view in zip(group, _views(layout, data), strict=True):
        view.copy_(tensor)
    return Bucket(layout, data)


def _views(layout: Layout, data: Tensor) -> Iterator[Tensor]:
    start = 0
    for _, dtype, shape in layout:
        size = prod(shape) * getattr(torch, dtype).itemsize
        yield data[start : start + size].view(getattr(torch, dtype)).view(shape)
        start += _aligned(size)


def _bytes(layout: Layout) -> int:
    return sum(_aligned(prod(shape) * getattr(torch, dtype).itemsize) for _, dtype, shape in layout)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Broadcast:
    """Broadcasts buckets from one rank to all others of a group; layouts are sent first through the group's store.

    Each `send` matches one `receive` on every other rank, which must end before the next `send`.
    """

    def __init__(self, store: Store, broadcast: Callable[[Tensor], None], device: torch.device) -> None:
        """`broadcast` sends the tensor on the sending rank and writes into it on the others."""
        self._store, self._broadcast, self._device = store, broadcast, device
        self._count = 0
        self._announced: list[str] = []

    def send(self, parts: Iterable[Bucket]) -> None:
        """Sends the buckets one by one."""
        for key in self._announced:
            self._store.delete_key(key)
        self._announced = []
        for part in parts:
            self._announce(part.layout)
            self._broadcast(part.data)
        self._announce([])

    def receive(self) -> Iterator[Bucket]:
        """Yields the received buckets, each in newly allocated memory."""
        while layout := json.loads(self._store.get(self._next_key())):
            data = torch.empty(_bytes(layout), dtype=torch.uint8, device=self._device)
            self._broadcast(data)
            yield Bucket(layout, data)

    def _announce(self, layout: Layout) -> None:
        self._announced.append(self._next_key())
        self._store.set(self._announced[-1], json.dumps(layout))

    def _next_key(self) -> str:
        self._count += 1
        return f"bucket-{self._count}"


class NcclBroadcast(Broadcast):
    """Broadcast from rank 0 over NCCL, with vLLM's communicator."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, device: torch.device) -> None:
        """Returns after all ranks have connected; `port` is a free port on rank 0's `host`."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        group = StatelessProcessGroup.create(host, port, rank, world_size)
        self._nccl = PyNcclCommunicator(group, device)
        if self._nccl.disabled:
            raise RuntimeError("vLLM's NCCL communicator is disabled: no NCCL library, or VLLM_DISABLE_PYNCCL is set")
        super().__init__(group.store, self._send_or_receive, device)

    def _send_or_receive(self, data: Tensor) -> None:
        self._nccl.broadcast(data, src=0, stream=torch.cuda.current_stream(self._device))

    def close(self) -> None:
        """Leaves the group, even if other ranks are already gone."""
        self._nccl.destroy()
