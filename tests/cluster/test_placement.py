"""Places on a cluster of three machines that all run here, each with CPUs and with GPUs that only Ray believes in."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Timer

import psutil
import pytest
import ray
from ray._private.utils import get_ray_address_file  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from rl_core.cluster import placement as placing
from rl_core.cluster import worker_group
from rl_core.cluster.dispatch import Dispatch, register
from rl_core.cluster.host import Host
from rl_core.cluster.placement import end_attempts, machines, natural, preflight, reserve
from rl_core.cluster.resources import ResourcePool, ray_session, shares
from rl_core.cluster.worker_group import RayWorkerGroup
from rl_core.errors import InputError, TransientError

HOME = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parents[1]
ROOT = Path(__file__).parents[2]
CPUS, GPUS = 2, 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # The machines' sizes differ: 2, 2 and 3 CPUs.
    Path(get_ray_address_file(None)).parent.mkdir(exist_ok=True)  # Ray's Cluster writes its address there
    head = {"num_cpus": CPUS, "num_gpus": GPUS, "include_dashboard": False, "temp_dir": str(HOME / "ray")}
    made = Cluster(initialize_head=True, head_node_args=head)
    for extra in range(2):
        made.add_node(num_cpus=CPUS + extra, num_gpus=GPUS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", made.address)
        with ray_session(HOME, 1, False):
            yield made
    made.shutdown()


@pytest.fixture
def run(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    yield f"s3://bucket/{request.node.name}"
    end_attempts(f"s3://bucket/{request.node.name}")


def worker_class(name: str) -> type:
    class Worker:
        def rendezvous(self) -> tuple[str, int]:
            return "host", 1

        def join(self, host: str, port: int) -> None:
            pass

        @register(Dispatch.ONE_TO_ALL)
        def place(self) -> tuple[str, str]:
            return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "")

    return type(name, (Worker,), {})


def test_ranks_follow_the_machines_by_address_and_number() -> None:
    addresses = ["10.0.0.10", "10.0.0.9", "10.0.1.1", "node-10", "node-2"]
    assert sorted(addresses, key=natural) == ["10.0.0.9", "10.0.0.10", "10.0.1.1", "node-2", "node-10"]


@pytest.mark.parametrize("backwards", [False, True])
def test_ranks_follow_the_machines_not_the_order_in_which_ray_deals_bundles(
    cluster: Cluster, run: str, monkeypatch: pytest.MonkeyPatch, backwards: bool
) -> None:
    order = [machine.node_id for machine in machines()]
    assert order == sorted(order) and len(order) == 3  # one address, so by id
    if backwards:
        order.reverse()
        monkeypatch.setattr(placing, "machines", lambda: machines()[::-1])
    (placement,) = reserve([ResourcePool(3, 2, False)], run, 300)
    group = RayWorkerGroup(placement, worker_class("Judge"), (), {}, 0.1, 300)
    group.meet()
    assert [node for node, _ in group.place()] == [node for node in order for _ in range(2)]


def test_ranks_of_one_group_get_a_device_each(cluster: Cluster, run: str) -> None:
    assert shares(1) == [1.0] and sum(shares(2)) == sum(shares(3)) == pytest.approx(1)
    (placement,) = reserve([ResourcePool(1, GPUS, True)], run, 300)
    groups = [RayWorkerGroup(placement, worker_class(f"W{i}"), (), {}, part, 300) for i, part in enumerate(shares(3))]
    for group in groups:
        group.meet()
        devices = [device for _, device in group.place()]
        assert sorted(devices) == ["0", "1"], devices


@pytest.mark.parametrize(
    ("pools", "expected", "seen", "where"),
    [
        ([ResourcePool(1, 5, False)], "1 machine(s) with CPU 5 each", ["has CPU 2: CPU short by 3", "CPU short by 2"],
         "trainer.nodes and trainer.ranks_per_node"),
        ([ResourcePool(2, 3, False)], "2 machine(s) with CPU 3 each", ["has CPU 2: CPU short by 1", "CPU 3: fits"],
         "trainer.nodes"),
        ([ResourcePool(4, 1, False)], "4 machine(s) with CPU 1 each", ["3 machine(s): ", "CPU 2: fits"],
         "trainer.nodes"),
        ([ResourcePool(1, 3, True)], "1 machine(s) with CPU 3, GPU 3 each",
         ["has CPU 2, GPU 2: CPU short by 1, GPU short by 1", "has CPU 3, GPU 2: GPU short by 1"], "trainer.nodes"),
        ([ResourcePool(3, 2, False), ResourcePool(1, 2, False, "reward.model")], "1 machine(s) with CPU 2 each",
         ["has CPU 0: CPU short by 2", "has CPU 1: CPU short by 1"],
         "reward.model.nodes and reward.model.ranks_per_node"),
    ],
    ids=["cores", "one machine", "machines", "devices", "second pool"],
)  # fmt: skip
def test_pools_that_cannot_fit_are_refused_before_anything_is_reserved(
    cluster: Cluster, run: str, pools: list[ResourcePool], expected: str, seen: list[str], where: str
) -> None:
    start = time.monotonic()
    with pytest.raises(InputError) as raised:
        reserve(pools, run, 60)
    assert time.monotonic() - start < 30
    assert raised.value.expected == expected and raised.value.where.startswith(where)
    assert all(part in raised.value.seen for part in seen), raised.value.seen
    assert all(f"(node {machine.node_id[:8]})" in raised.value.seen for machine in machines())
    assert not any(run in table["name"] for table in placement_group_table().values())


def test_a_small_pool_leaves_the_roomy_machine_to_the_next_one(cluster: Cluster) -> None:
    preflight([ResourcePool(1, 2, False), ResourcePool(1, 3, False)])


def test_places_that_another_run_holds_are_named_with_the_run(cluster: Cluster, run: str) -> None:
    reserve([ResourcePool(3, 2, True)], run, 300)
    with pytest.raises(TransientError) as raised:
        preflight([ResourcePool(1, 2, True)], patience=1.0)
    told = str(raised.value)
    assert "did not free 1 machine(s) with CPU 2, GPU 2 each within 1 s" in told
    assert "has CPU 0, GPU 0: CPU short by 2, GPU short by 2" in told and "has CPU 1, GPU 0: CPU short by 1" in told
    assert f"placement groups in use: rollforward {run} (trainer)" in told
    assert len([table for table in placement_group_table().values() if table["state"] == "CREATED"]) == 1


DRIVER = """
import os, time
from pathlib import Path
from rl_core.cluster.dispatch import Dispatch, register
from rl_core.cluster.placement import reserve
from rl_core.cluster.resources import ResourcePool, ray_session
from rl_core.cluster.host import Host
from rl_core.cluster.worker_group import RayWorkerGroup

class Sleeper:
    def rendezvous(self):
        return "host", 1
    def join(self, host, port):
        pass
    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()
    @register(Dispatch.ONE_TO_ALL)
    def nap(self, seconds):
        time.sleep(seconds)

with ray_session(Path({home!r}), 1, False):
    (placement,) = reserve([ResourcePool(3, 1, True)], {run!r}, 300)
    group = RayWorkerGroup(placement, Sleeper, (), {{}}, 0.5, 600)
    group.meet()
    print(*group.pid(), flush=True)
    group.nap(600)
"""


@pytest.mark.parametrize("killed", [True, False], ids=["killed a moment ago", "alive"])
def test_a_new_attempt_ends_what_another_driver_of_the_run_left(
    cluster: Cluster, run: str, tmp_path: Path, killed: bool
) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.format(home=str(HOME), run=run))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True) as driver,
        ExitStack() as cleanup,
    ):
        cleanup.callback(driver.kill)
        assert driver.stdout is not None
        old = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        assert len(old) == 3
        if killed:
            driver.send_signal(signal.SIGKILL)
        start = time.monotonic()
        (placement,) = reserve([ResourcePool(3, 1, True)], run, 120)
        assert time.monotonic() - start < 60
        _, left = psutil.wait_procs(old, timeout=5)
        assert not left, "workers of two attempts live at once"
        group = RayWorkerGroup(placement, worker_class("Sleeper"), (), {}, 0.5, 300)  # the same names again
        group.meet()
        if not killed:
            assert driver.wait(120) != 0, "the old driver does not notice that it has been replaced"


def test_a_name_that_a_killed_actor_still_holds_is_waited_for(
    cluster: Cluster, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (placement,) = reserve([ResourcePool(1, 2, False)], run, 300)
    holder = ray.remote(Host).options(name="Waiting-1", namespace=placement.namespace, num_cpus=0).remote({})
    with monkeypatch.context() as patch:
        patch.setattr(worker_group, "NAME_PATIENCE", 0.3)
        with pytest.raises(TransientError, match=r"another attempt of this run is starting.*Waiting-1"):
            RayWorkerGroup(placement, worker_class("Waiting"), (), {}, 0.1, 300)
    release = Timer(1.0, ray.kill, (holder,))
    release.start()
    group = RayWorkerGroup(placement, worker_class("Waiting"), (), {}, 0.1, 300)
    group.meet()
    assert len(group.place()) == 2
    release.join()


def test_a_run_of_another_name_is_left_alone(cluster: Cluster, run: str) -> None:
    (placement,) = reserve([ResourcePool(1, 2, False)], f"{run}-2", 300)
    group = RayWorkerGroup(placement, worker_class("Neighbour"), (), {}, 0.5, 300)
    group.meet()
    end_attempts(run)
    assert len(group.place()) == 2
    end_attempts(f"{run}-2")
