"""Groups of real Ray actors on one local cluster."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import ray
import torch
from ray.util.placement_group import placement_group_table

from rl_core.cluster import calls
from rl_core.cluster.dispatch import Dispatch, Layout, register
from rl_core.cluster.host import AsyncHost, Host
from rl_core.cluster.placement import Placement, end_attempts, reserve
from rl_core.cluster.resources import ResourcePool, ray_session
from rl_core.cluster.worker_group import RayWorkerGroup
from rl_core.config.schema import RunConfig
from rl_core.data.protocol import DataProto
from rl_core.errors import InputError, TrainingError, TransientError, WorkerError, WorkerLost

HOME = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parents[1]
RUN = "s3://bucket/runs/one"
numbers = count()


def worker_class() -> type:
    # Made in a function, so that Ray sends the class itself: its processes cannot import this file.
    class Worker:
        def __init__(self, name: str) -> None:
            self.name, self.rank = name, int(os.environ["RANK"])
            if name == "raises" and self.rank == 1:
                raise InputError("a good name", name, "here", "take another")
            if name == "breaks" and self.rank == 1:
                raise LookupError("no such name")
            if name == "dies" and self.rank == 1:
                os._exit(3)

        def rendezvous(self) -> tuple[str, int]:
            return "host", 1234

        def join(self, host: str, port: int) -> None:
            self.joined = host, port

        @register(Dispatch.ONE_TO_ALL)
        def place(self) -> tuple[object, ...]:
            return self.name, self.joined, *(os.environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "EXTRA"))

        @register(Dispatch.ONE_TO_ALL)
        def pid(self) -> int:
            return os.getpid()

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
        def break_collective(self, first: str) -> None:
            if self.rank == 0:  # reports at once what only follows from the other rank's end
                raise RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.2]:5")
            time.sleep(1.5)
            if first == "raises":
                raise ValueError("the real cause")
            if first == "dies":
                os._exit(1)
            time.sleep(60)

        @register(Dispatch.ONE_TO_ALL)
        def nap(self, rank: int, seconds: float) -> tuple[float, float]:
            begin = time.monotonic()
            time.sleep(seconds * (self.rank == rank))
            return begin, time.monotonic()

        @register(Dispatch.ONE_TO_ALL)
        def die(self) -> None:
            os._exit(1)

        def hidden(self) -> None:
            """Not registered."""

    return type(f"Worker{next(numbers)}", (Worker,), {})  # groups of one run have names of their own


def waiting_class() -> type:
    """A worker for the asynchronous host."""

    class Waiting(worker_class()):  # type: ignore[misc]
        @register(Dispatch.ONE_TO_ALL)
        async def wait_for(self, name: str) -> str:
            while self.name != name:
                await asyncio.sleep(0.01)
            return name

        @register(Dispatch.ONE_TO_ALL)
        def rename(self, name: str) -> None:
            self.name = name

    return type(f"Waiting{next(numbers)}", (Waiting,), {})


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
    with ray_session(HOME, 4, False):
        yield
        started = ray_processes()
        assert len(started) > 3
    _, left = psutil.wait_procs(started, timeout=60)
    assert not left, f"the session left {left}"


@pytest.fixture(scope="module")
def placement(ray_here: None) -> Iterator[Placement]:
    (placement,) = reserve([ResourcePool(1, 2, False)], RUN, 300)
    yield placement
    end_attempts(RUN)


def make_group(
    placement: Placement,
    name: str = "me",
    layout: Layout | None = None,
    slots: range | None = None,
    host: type[Host] = Host,
) -> RayWorkerGroup:
    env = {"EXTRA": "kept", "OMP_NUM_THREADS": "1"}
    made = waiting_class() if host is AsyncHost else worker_class()
    group = RayWorkerGroup(placement, made, (name,), env, 0.01, 300, layout, slots=slots, host=host)
    group.meet()
    return group


@pytest.fixture(scope="module")
def shared_group(placement: Placement) -> RayWorkerGroup:
    return make_group(placement)


@pytest.fixture
def failing_group(placement: Placement) -> RayWorkerGroup:
    return make_group(placement)


@pytest.fixture
def group(shared_group: RayWorkerGroup) -> Iterator[RayWorkerGroup]:
    yield shared_group
    shared_group.deadline = 300


def test_ranks_know_their_place_and_have_met(group: RayWorkerGroup) -> None:
    assert group.place() == [("me", ("host", 1234), str(rank), "2", str(rank), "kept") for rank in range(2)]


@pytest.mark.parametrize("count", [4, 5])
def test_rows_keep_their_order_over_the_ranks(group: RayWorkerGroup, count: int) -> None:
    result = group.double(DataProto({"x": torch.arange(count)}), 1)
    assert result.batch["y"].tolist() == [2 * i + 1 for i in range(count)]
    half = -(-count // 2)
    assert result.batch["rank"].tolist() == [int(i >= half) for i in range(count)]


def test_ranks_that_share_sequences_get_the_same_rows_and_the_first_answers(
    placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group(placement, layout=Layout(2, 2))
    put = Mock(wraps=ray.put)
    monkeypatch.setattr(ray, "put", put)
    result = group.double(DataProto({"x": torch.arange(3)}), 1)
    assert result.batch["y"].tolist() == [1, 3, 5] and result.batch["rank"].tolist() == [0, 0, 0]
    assert [len(call.args[0]) for call in put.call_args_list] == [3], "what two ranks get is put once"


def test_rank_zero_answers_alone(group: RayWorkerGroup) -> None:
    assert group.first() == 0


def test_a_method_that_is_not_registered_is_an_attribute_error(group: RayWorkerGroup) -> None:
    for name in ("hidden", "unknown"):
        with pytest.raises(AttributeError, match=f"no registered method '{name}'"):
            getattr(group, name)


def test_submitted_calls_run_while_the_driver_goes_on(placement: Placement, group: RayWorkerGroup) -> None:
    other = make_group(placement)
    naps = [group.nap.submit(0, 1.5), other.nap.submit(1, 1.5)]
    submitted = time.monotonic()
    (first, _), (_, second) = [nap.get() for nap in naps]
    assert submitted < first[1], "the driver waited for the first nap"
    assert max(first[0], second[0]) < min(first[1], second[1]), "one nap waited for the other"


def test_a_call_beyond_the_deadline_names_rank_and_method(group: RayWorkerGroup) -> None:
    group.deadline = 1.5
    call = group.nap.submit(1, 4.0)
    with pytest.raises(TransientError, match=r"Worker\d+\.nap on rank\(s\) \[1\] did not answer within 2 s"):
        call.get()


def test_a_slow_call_within_the_deadline_is_waited_for(group: RayWorkerGroup) -> None:
    assert len(group.nap(0, 1.5)) == 2


@pytest.mark.parametrize("wait", [calls.Call.get, lambda call: calls.first_settled([call])], ids=["get", "first"])
def test_what_a_signals_handler_raises_ends_the_wait(
    wait: Callable[[calls.Call], object], group: RayWorkerGroup
) -> None:
    class Stop(BaseException):
        pass

    def stop(number: int, frame: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGTERM, stop)
    main = threading.main_thread().ident or 0
    try:
        call = group.nap.submit(1, 3.0)
        threading.Timer(0.7, signal.pthread_kill, [main, signal.SIGTERM]).start()
        with pytest.raises(Stop):
            wait(call)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(call.get()) == 2


@pytest.mark.parametrize(
    ("kind", "expected", "text"),
    [
        ("training", TrainingError, "the loss is not finite"),
        ("input", InputError, "expected: a"),
        ("other", WorkerError, r"^Worker\d+\.fail on rank 1 raised KeyError: 'missing'"),
    ],
)
def test_a_workers_own_error_reaches_the_driver(
    failing_group: RayWorkerGroup, kind: str, expected: type[Exception], text: str
) -> None:
    start = time.monotonic()
    with pytest.raises(expected, match=text) as raised:
        failing_group.fail(kind)
    assert time.monotonic() - start < 40, "the error waited for the other rank"
    assert type(raised.value) is expected
    told = str(raised.value) if kind == "other" else str(raised.value.__cause__)
    assert "in fail" in told, "nobody says where it happened"
    if kind != "other":
        assert raised.value.__notes__[0].endswith(".fail on rank 1")


def test_a_group_may_have_some_places_of_a_pool_and_calls_of_coroutines_go_on_side_by_side(
    placement: Placement,
) -> None:
    group = make_group(placement, slots=range(1, 2), host=AsyncHost)
    assert group.place() == [("me", ("host", 1234), "0", "1", "1", "kept")]
    waiting = group.wait_for.submit("renamed")
    assert not waiting.settled()
    group.rename("renamed")
    assert waiting.get() == ["renamed"] and waiting.settled()


def test_the_first_error_of_calls_that_need_each_other_ends_the_wait(placement: Placement) -> None:
    group = make_group(placement, host=AsyncHost)
    fine, hanging, failing = group.pid.submit(), group.wait_for.submit("never"), make_group(placement).die.submit()
    assert calls.first_settled([hanging, fine]) is fine
    with pytest.raises(WorkerLost, match="was lost during die"):
        calls.finish_together([hanging, fine, failing])
    group.kill()
    with pytest.raises(WorkerLost, match="was lost during wait_for"):
        hanging.get()


def test_a_lost_worker_is_a_transient_error(failing_group: RayWorkerGroup) -> None:
    with pytest.raises(WorkerLost, match=r"rank [01] of Worker\d+ was lost during die"):
        failing_group.die()
    with pytest.raises(TransientError, match=r"rank [01] of Worker\d+ was lost during place"):
        failing_group.place()


@pytest.mark.parametrize(
    ("name", "expected", "text"),
    [
        ("raises", InputError, "expected: a good name"),
        ("breaks", WorkerError, r"^Worker\d+\.start on rank 1 raised LookupError: no such name[^$]*in __init__"),
        ("dies", TransientError, r"rank 1 of Worker\d+ was lost during start"),
    ],
)
def test_what_goes_wrong_in_a_constructor_is_told_as_it_is(
    placement: Placement, name: str, expected: type[Exception], text: str
) -> None:
    start = time.monotonic()
    with pytest.raises(expected, match=text):
        make_group(placement, name)
    assert time.monotonic() - start < 200, "the error waited for the deadline"


@pytest.mark.parametrize(
    ("first", "expected", "text"),
    [
        ("raises", WorkerError, r"^Worker\d+\.break_collective on rank 1 raised ValueError: the real cause"),
        ("dies", TransientError, r"^rank 1 of Worker\d+ was lost during break_collective"),
        ("hangs", TransientError, r"break_collective on rank 0 lost the other ranks: .*Connection closed by peer"),
    ],
)
def test_the_root_cause_is_shown_not_the_broken_collective_it_leads_to(
    failing_group: RayWorkerGroup, first: str, expected: type[Exception], text: str
) -> None:
    start = time.monotonic()
    with pytest.raises(expected, match=text):
        failing_group.break_collective(first)
    assert time.monotonic() - start < calls.GRACE + 40


def joining_class() -> type:
    from rl_core.cluster.base_worker import Worker

    class Joining(Worker):
        @register(Dispatch.ONE_TO_ALL)
        def gather(self, second: str) -> float:
            import torch.distributed as dist

            value = torch.ones(1)
            dist.all_reduce(value)
            if int(os.environ["RANK"]) == 1:
                time.sleep(1.0)
                if second == "raises":
                    raise ValueError("the real cause")
                os._exit(1)
            dist.all_reduce(value)
            return value.item()

    return Joining


@pytest.mark.parametrize(
    ("second", "expected", "text"),
    [
        ("raises", WorkerError, "^Joining.gather on rank 1 raised ValueError: the real cause"),
        ("dies", TransientError, "^rank 1 of Joining was lost during gather"),
    ],
)
def test_a_real_collective_that_another_rank_leaves(
    ray_here: None, second: str, expected: type[Exception], text: str
) -> None:
    """Gloo itself: the first rank hangs in it, or fails in words of its own, because of the second one."""
    run = f"s3://bucket/runs/{second}"
    (placement,) = reserve([ResourcePool(1, 2, False)], run, 300)
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    group = RayWorkerGroup(placement, joining_class(), (RunConfig(),), env, 0.5, 300)
    group.meet()
    start = time.monotonic()
    with pytest.raises(expected, match=text):
        group.gather(second)
    assert time.monotonic() - start < calls.GRACE + 120
    end_attempts(run)


def test_nothing_is_left_when_the_run_is_closed(ray_here: None) -> None:
    run = "s3://bucket/runs/closed"
    (placement,) = reserve([ResourcePool(1, 2, False)], run, 300)
    processes = [psutil.Process(pid) for pid in make_group(placement).pid()]
    assert all("Worker" in process.name() or "Worker" in " ".join(process.cmdline()) for process in processes)
    end_attempts(run)
    assert placement.namespace not in {actor["namespace"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    states = {table["state"] for table in placement_group_table().values() if run in table["name"]}
    assert states == {"REMOVED"}
    _, left = psutil.wait_procs(processes, timeout=30)
    assert not left
