"""Weights in buckets and their broadcast, with a transport in memory."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Queue

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import HashStore

from rl_core.rollout.weights.transfer import ALIGNMENT, Broadcast, Bucket, buckets, unpack

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
SHAPES = st.lists(st.integers(0, 5), max_size=3)


def named(shapes: list[tuple[torch.dtype, list[int]]], seed: int = 0) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (f"layers.{i}.weight", torch.randint(0, 100, shape, generator=generator).to(dtype))
        for i, (dtype, shape) in enumerate(shapes)
    ]


def assert_same(seen: list[tuple[str, Tensor]], wanted: list[tuple[str, Tensor]]) -> None:
    assert [name for name, _ in seen] == [name for name, _ in wanted]
    for (_, a), (_, b) in zip(seen, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=12), st.integers(1, 400))
def test_what_is_packed_comes_out_as_it_was(shapes: list[tuple[torch.dtype, list[int]]], size: int) -> None:
    tensors = named(shapes)
    parts = list(buckets(iter(tensors), size))
    assert all(part.data.nbytes <= size + ALIGNMENT or len(part.layout) == 1 for part in parts)
    assert_same([pair for part in parts for pair in unpack(part)], tensors)


def test_a_bucket_is_full_before_the_next_one_begins_and_a_large_tensor_has_its_own() -> None:
    tensors = [(name, torch.ones(count)) for name, count in [("a", 4), ("b", 4), ("c", 4), ("big", 100), ("d", 4)]]
    parts = [[name for name, _, _ in part.layout] for part in buckets(tensors, 32)]
    assert parts == [["a", "b"], ["c"], ["big"], ["d"]]


def test_the_bytes_of_a_pickled_bucket_travel_beside_the_pickle() -> None:
    """As they do through Ray's object store, which maps them into the reader's memory."""
    tensors = [("w", torch.randn(1000).bfloat16()), ("t", torch.randn(30, 20).T)]
    (bucket,) = buckets(tensors)
    beside: list[pickle.PickleBuffer] = []
    small = pickle.dumps(bucket, protocol=5, buffer_callback=beside.append)
    assert len(small) < 1000 and len(beside) == 1
    (raw,) = [buffer.raw() for buffer in beside]
    copy: Bucket = pickle.loads(small, buffers=[raw.toreadonly()])
    assert copy.data.data_ptr() == bucket.data.data_ptr()
    assert_same(list(unpack(copy)), tensors)


def test_every_rank_receives_what_the_first_one_sends_push_after_push() -> None:
    store, queues = HashStore(), [Queue[Tensor](), Queue[Tensor]()]

    def send(data: Tensor) -> None:
        for queue in queues:
            queue.put(data.clone())

    sender = Broadcast(store, send, CPU)

    def receive(queue: Queue[Tensor], data: Tensor) -> None:
        data.copy_(queue.get(timeout=10))

    receivers = [Broadcast(store, partial(receive, queue), CPU) for queue in queues]
    pushes = [named([(torch.float32, [3, 4]), (torch.bfloat16, [7]), (torch.int64, [50])], seed) for seed in range(3)]
    pushes.append(named([(torch.float32, [1])]))
    with ThreadPoolExecutor() as threads:
        for tensors in pushes:
            reads = [threads.submit(lambda r: list(r.receive()), receiver) for receiver in receivers]
            sender.send(buckets(tensors, 64))
            for read in reads:
                assert_same([pair for part in read.result(timeout=10) for pair in unpack(part)], tensors)
    assert store.num_keys() <= 3, "layouts of earlier pushes pile up"
