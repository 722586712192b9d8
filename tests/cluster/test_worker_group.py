"""Groups of real Ray actors on one local cluster."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from rl_core.cluster.dispatch import Dispatch, register
from rl_core.cluster.resources import ResourcePool, ray_session
from rl_core.cluster.worker_group import Placement, RayWorkerGroup
from rl_core.data.protocol import DataProto
from rl_core.errors import InputError, TrainingError, TransientError

HOME = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parents[1]


def worker_class() -> type:
    # Made in a function, so that Ray sends the class itself: its processes cannot import this file.
    class Worker:
        def __init__(self, name: str) -> None:
            self.name, self.rank = name, int(os.environ["RANK"])

        def rendezvous(self) -> tuple[str, int]:
            return "host", 1234

        def join(self, host: str, port: int) -> None:
            self.joined = host, port

        @register(Dispatch.ONE_TO_ALL)
        def place(self) -> tuple[object, ...]:
            return self.name, self.joined, *(os.environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "EXTRA"))

        @register(Dispatch.DP_COMPUTE_PROTO)
        def double(self, data: DataProto, add: int) -> DataProto:
            time.sleep(0.3 * (self.rank == 0))  # the first rank answers last
            rank = torch.full((len(data),), self.rank)
            return DataProto({"y": data.batch["x"] * 2 + add, "rank": rank})

        @register(Dispatch.RANK_ZERO)
        def first(self) -> int:
            return self.rank

        @register(Dispatch.ONE_TO_ALL)
        def fail(self, kind: str) -> None:
            if self.rank == 1:
                raise {
                    "training": TrainingError("the loss is not finite"),
                    "input": InputError("a", "b", "c", "d"),
                    "other": KeyError("missing"),
                }[kind]
            time.sleep(60)

        @register(Dispatch.ONE_TO_ALL)
        def nap(self, rank: int, seconds: float) -> str:
            time.sleep(seconds * (self.rank == rank))
            return "rested"

        @register(Dispatch.ONE_TO_ALL)
        def die(self) -> None:
            os._exit(1)

        def hidden(self) -> None:
            """Not registered."""

    return Worker


def ray_processes() -> list[psutil.Process]:
    """Processes of Ray below this one, at present."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # gone meanwhile, or a dead one that nobody has waited for
            if "ray" in " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    with ray_session(HOME, 2, False):
        yield
        started = ray_processes()
        assert len(started) > 3
    _, left = psutil.wait_procs(started, timeout=10)
    assert not left, f"the session left {left}"


@pytest.fixture(scope="module")
def placement(ray_here: None) -> Iterator[Placement]:
    placement = Placement(ResourcePool(1, 2, False), 30)
    yield placement
    placement.close()


def make_group(placement: Placement) -> RayWorkerGroup:
    env = {"EXTRA": "kept", "OMP_NUM_THREADS": "1"}
    return RayWorkerGroup(placement.pool, placement.group, worker_class(), ("me",), env, 0.25, 60)


@pytest.fixture(scope="module")
def shared_group(placement: Placement) -> Iterator[RayWorkerGroup]:
    group = make_group(placement)
    yield group
    group.close()


@pytest.fixture(scope="module")
def failing_group(placement: Placement) -> Iterator[RayWorkerGroup]:
    group = make_group(placement)
    yield group
    group.close()


@pytest.fixture
def group(shared_group: RayWorkerGroup) -> Iterator[RayWorkerGroup]:
    yield shared_group
    shared_group.deadline = 60


def test_ranks_know_their_place_and_have_met(group: RayWorkerGroup) -> None:
    assert group.place() == [("me", ("host", 1234), str(rank), "2", str(rank), "kept") for rank in range(2)]


@pytest.mark.parametrize("count", [4, 5])
def test_rows_keep_their_order_over_the_ranks(group: RayWorkerGroup, count: int) -> None:
    result = group.double(DataProto({"x": torch.arange(count)}), 1)
    assert result.batch["y"].tolist() == [2 * i + 1 for i in range(count)]
    half = -(-count // 2)
    assert result.batch["rank"].tolist() == [int(i >= half) for i in range(count)]


def test_rank_zero_answers_alone(group: RayWorkerGroup) -> None:
    assert group.first() == 0


def test_a_method_that_is_not_registered_is_an_attribute_error(group: RayWorkerGroup) -> None:
    for name in ("hidden", "unknown"):
        with pytest.raises(AttributeError, match=f"no registered method '{name}'"):
            getattr(group, name)


def test_a_call_beyond_the_deadline_names_rank_and_method(group: RayWorkerGroup) -> None:
    group.deadline = 1.5
    start = time.monotonic()
    with pytest.raises(TransientError, match=r"Worker\.nap on rank\(s\) \[1\] did not answer within 2 s"):
        group.nap(1, 4.0)
    assert time.monotonic() - start < 4


def test_a_slow_call_within_the_deadline_is_waited_for(group: RayWorkerGroup) -> None:
    assert group.nap(0, 1.5) == ["rested", "rested"]


@pytest.mark.parametrize(
    ("kind", "expected", "text"),
    [
        ("training", TrainingError, "the loss is not finite"),
        ("input", InputError, "expected: a"),
        ("other", KeyError, "missing"),
    ],
)
def test_a_workers_own_error_reaches_the_driver(
    failing_group: RayWorkerGroup, kind: str, expected: type[Exception], text: str
) -> None:
    start = time.monotonic()
    with pytest.raises(expected, match=text) as raised:
        failing_group.fail(kind)
    assert time.monotonic() - start < 5, "the error waited for the other rank"
    if kind != "other":
        assert type(raised.value) is expected
        assert "in fail" in str(raised.value.__cause__), "nobody says where it happened"


def test_a_lost_worker_is_a_transient_error(placement: Placement) -> None:
    group = make_group(placement)
    with pytest.raises(TransientError, match="a Worker was lost during die"):
        group.die()
    with pytest.raises(TransientError, match="a Worker was lost during place"):
        group.place()
    group.close()


@pytest.mark.parametrize(
    ("pool", "wanted"),
    [
        (ResourcePool(1, 9999, False), "1 machine(s) with CPU 9999 each"),
        (ResourcePool(3, 1, False), "3 machine(s) with CPU 1 each"),
        (ResourcePool(1, 1, True), "GPU 1 each"),
    ],
    ids=["cores", "machines", "devices"],
)
def test_a_pool_that_cannot_fit_is_refused_at_once(ray_here: None, pool: ResourcePool, wanted: str) -> None:
    start = time.monotonic()
    with pytest.raises(InputError) as raised:
        Placement(pool, 60)
    assert time.monotonic() - start < 2
    assert wanted in raised.value.expected
    assert raised.value.seen.startswith("1 machine(s): CPU ")
    assert "trainer.ranks_per_node" in raised.value.where


def test_places_that_are_taken_are_a_transient_error(placement: Placement) -> None:
    cores = int(placement.pool.node_bundle()["CPU"])
    total = psutil.cpu_count() or cores
    with pytest.raises(TransientError, match="did not free"):
        Placement(ResourcePool(1, max(total - cores, 0) + 1, False), 0.5)
