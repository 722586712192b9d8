"""Whatever hangs ends within its deadline, and says who waits for what since when.

Elsewhere: a scorer that hangs (tests/rewards/test_reward_runner.py), a tool (tests/rollout/agent/test_tool_runner.py),
a rank that is stopped (tests/trainer/test_trainer.py).
"""

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psutil
import pytest
import ray

from rl_core.cluster import calls, stall
from rl_core.cluster.dispatch import Dispatch, register
from rl_core.cluster.host import AsyncHost, Host
from rl_core.cluster.placement import Placement, end_attempts, reserve
from rl_core.cluster.resources import ResourcePool, ray_session
from rl_core.cluster.worker_group import RayWorkerGroup
from rl_core.config.schema import RunConfig
from rl_core.errors import Stalled
from rl_core.storage.status import Status, read_status
from rl_core.storage.store import Store
from tasks.runs.hang_report import write_hang_report
from tasks.tracking.tracker import Tracker

HOME = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parents[1]
RUN = "hangs"
DEADLINE = 2.0
numbers = count()


def ranks_class() -> type:
    # Made in a function, so that Ray sends the class itself: its processes cannot import this file.
    from rl_core.cluster.base_worker import Worker

    class Ranks(Worker):
        def never_answers(self) -> None:
            time.sleep(600)

        @register(Dispatch.ONE_TO_ALL)
        def reduce(self, hanging: int) -> None:
            import torch
            import torch.distributed as dist

            if dist.get_rank() == hanging:
                self.never_answers()
            dist.all_reduce(torch.ones(1))

        @register(Dispatch.ONE_TO_ALL)
        def nap(self, seconds: float) -> int:
            time.sleep(seconds)
            return os.getpid()

    return Ranks


def engine_class() -> type:
    class Endless:
        """An engine whose decoding never ends."""

        def add_request(self, number: str, *_: object, **__: object) -> str:
            return number

        def step(self) -> list[object]:
            while True:
                time.sleep(1)

    class Engine:
        def __init__(self) -> None:
            from rl_core.rollout.engine.vllm_requests import VLLMRequests

            self.requests = VLLMRequests(Endless(), 1, 4, 8)  # type: ignore[arg-type]

        @register(Dispatch.RANK_ZERO)
        async def generate_sequences(self) -> None:
            from rl_core.rollout.engine.protocol import Sampling
            from rl_core.rollout.engine.vllm_requests import VLLMRequest

            request = VLLMRequest([1], 0, Sampling(1.0, 4, ()), params=None, adapter=None)  # type: ignore[arg-type]
            await self.requests.run(request)

        @register(Dispatch.RANK_ZERO)
        async def awaits_for_ever(self) -> None:
            await asyncio.Event().wait()

    return Engine


@pytest.fixture(scope="module")
def placement() -> Iterator[Placement]:
    with ray_session(HOME, 2, False):
        (placement,) = reserve([ResourcePool(1, 2, False)], RUN, 300)
        yield placement
        end_attempts(RUN)


@contextmanager
def made(placement: Placement, worker: type, ranks: int = 2, host: type[Host] = Host) -> Iterator[RayWorkerGroup]:
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    args = (RunConfig(),) if host is Host else ()
    group = RayWorkerGroup(
        placement, worker, args, env, 0.1, 300, slots=range(ranks), name=f"{worker.__name__}{next(numbers)}", host=host
    )
    if host is Host:
        group.meet()
    else:
        group._started.get()
    yield group
    processes = [psutil.Process(rank.pid) for rank in group.ranks]
    group.kill()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


@pytest.fixture(scope="module")
def ranks(placement: Placement) -> Iterator[RayWorkerGroup]:
    with made(placement, ranks_class()) as group:
        yield group


def test_a_call_that_takes_unusually_long_is_told_of_before_its_deadline(
    ranks: RayWorkerGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calls, "UNUSUAL_S", 5.0)
    with caplog.at_level(logging.WARNING):
        for seconds in (0.0, 0.0, 0.3):
            ranks.nap(seconds)
        assert caplog.messages == []
        ranks.nap(8.0)
    (told,) = caplog.messages
    assert re.match(rf"still waiting for {ranks.name}.nap on rank\(s\) \[0, 1\], since \d\d:\d\d:\d\d; ", told)


def test_a_rank_that_others_wait_for_in_a_collective_is_named_with_what_it_does(
    ranks: RayWorkerGroup, tmp_path: Path
) -> None:
    ranks.deadline, called = DEADLINE, time.strftime("%H:%M")
    start = time.monotonic()
    with pytest.raises(Stalled) as raised:
        ranks.reduce(1)
    assert time.monotonic() - start < DEADLINE + 60
    first, hanging, waiting = str(raised.value).splitlines()
    assert first.startswith(f"{ranks.name}.reduce on rank(s) [0, 1] did not answer within 2 s (trainer.call_timeout_s)")
    assert f"called at {called}" in first
    who = f"rank 1 (process {ranks.ranks[1].pid} on {ranks.ranks[1].address})"
    assert re.search(rf"{re.escape(who)} is in never_answers \(test_hangs.py:\d+\) < reduce", hanging)
    assert re.search(r"rank 0 .* waits for other ranks in .* < reduce \(test_hangs.py:\d+\)", waiting)
    assert "in all_reduce" in raised.value.report and raised.value.report.count("most recent call first") >= 4

    # From another machine of the cluster it is asked through Ray.
    elsewhere = ray.get(stall._observe_elsewhere(ranks.ranks[1]), timeout=120)
    assert stall.describe(elsewhere) in hanging

    file = write_hang_report(tmp_path, "a/run", Status(stage="train", phase="push", step=4), raised.value.report)
    text = file.read_text()
    assert file.parent == tmp_path / "stalls" and file.name.startswith("a_run-")
    assert text.startswith("run a/run, stage train, step 5: the rollout engines wait for the new weights, since ")
    assert "in never_answers" in text and "in write_hang_report" in text

    os.kill(ranks.ranks[1].pid, signal.SIGSTOP)
    with pytest.raises(Stalled, match=rf"{re.escape(who)} is stopped by a signal"):
        ranks.nap(0.0)


def test_an_engine_whose_decoding_hangs(placement: Placement) -> None:
    with made(placement, engine_class(), 1, AsyncHost) as engine:
        engine.deadline = DEADLINE
        with pytest.raises(Stalled, match="awaits an operation in its event loop"):
            engine.awaits_for_ever()
        with pytest.raises(Stalled, match=r"generate_sequences on rank\(s\) \[0\] did not answer") as raised:
            engine.generate_sequences()
        assert re.search(r"is in step \(test_hangs.py:\d+\) < _step \(vllm_requests.py", str(raised.value))


SILENT_FILES = """
import os, subprocess, time
import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from flows.home import prepare_home
from rl_core.config.compose import compose

home = prepare_home(False)
from flows.first_checks import watch_for_hang
from flows.preflight import preflight
from tasks.prepare_data import prepare_data
from tasks.runs.open_run import open_run
from tasks.session.session import open_session

class Silent(MemoryFileSystem):
    protocol = "silent"
    def never_answers(self, *args, **options):
        time.sleep(600)
    info = ls = find = exists = isfile = isdir = glob = open = never_answers

fsspec.register_implementation("silent", Silent)
if (looking := os.fork()) == 0:
    composed = compose("grpo", ["storage.root=silent://runs", "trainer.stall_timeout_s=1"])
    with watch_for_hang(composed.config):
        preflight(composed, home)
print("ended with", os.waitstatus_to_exitcode(os.waitpid(looking, 0)[1]), flush=True)

rows = ["data.source=files", "data.path=silent://rows.parquet", "data.val_path=silent://val.parquet"]
with open_session(open_run(compose("grpo", [*rows, "trainer.stall_timeout_s=2"]), home, "silent")) as session:
    print("child", subprocess.Popen(["sleep", "600"]).pid, flush=True)
    prepare_data.__wrapped__(session)
"""


def test_files_that_never_answer_end_the_process(tmp_path: Path) -> None:
    """First storage, looked at before a run, in a process of its own; then rows, in a run."""
    env = {**os.environ, "ROLLFORWARD_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", SILENT_FILES],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
    )  # fmt: skip
    before, _, output = done.stdout.partition("ended with 1\n")
    assert re.search(r"no progress for \d s .* before the run started: this process hangs in never_", before), (
        done.stdout
    )

    assert done.returncode == 1, output
    told = r"no progress for \d s \(trainer.stall_timeout_s\): stage none, since [\d:]+; this process hangs in never_"
    assert re.search(told, output), output
    assert "to resume: the same command with --run silent" in output
    (file,) = (tmp_path / "stalls").iterdir()
    assert str(file) in output and "in never_answers" in file.read_text()
    status = read_status(Store(str(tmp_path / "runs/silent")))
    assert status and status.state == "failed" and "never_answers" in status.error
    child = int(re.findall(r"child (\d+)", output)[0])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


HOLDING_THE_LOCK = """
import ctypes
from rl_core.runtime import watchdog
watchdog.CHECK_S, watchdog.HELD_S = 0.1, 0.5
watchdog.Watchdog(1.5, print).__enter__()
import time; time.sleep(0.5)
ctypes.PyDLL(None).sleep(600)
"""


def test_code_that_holds_the_interpreters_lock_cannot_hold_the_process() -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", HOLDING_THE_LOCK]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and "Timeout (0:00:02)" in done.stderr and '<string>", line 7' in done.stderr


def test_a_tracker_that_never_answers_holds_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import mlflow  # noqa: F401  seconds that are not the tracker's

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        tracker = Tracker(f"http://127.0.0.1:{silent.getsockname()[1]}", "e", "r", "k", None)
        start = time.monotonic()
        sent = tracker.flush(lambda _: [{"step": 1, "time": 0.0, "metrics": {"reward/mean": 1.0}}])
        assert sent == 0 and time.monotonic() - start < 40
    assert re.search(
        r"Metrics are stored and sent later. MLflow at http://\S+ failed: no answer within 3 s", caplog.text
    )
