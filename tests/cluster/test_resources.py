"""Ray starts in the run's process, also when that is told to stop meanwhile."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support_flows import environment

from rl_core.cluster import local_ray
from rl_core.cluster.local_ray import LocalRay
from rl_core.cluster.resources import ray_session
from rl_core.errors import TransientError

START = """
import os, signal, sys, threading
from pathlib import Path
from flows.home import prepare_environment
home = Path(sys.argv[1])
prepare_environment(home)
from rl_core.cluster.resources import ray_session
from rl_core.runtime.guardian import start_guardian

class Stop(BaseException):
    pass

def stop(number, frame):
    raise Stop

start_guardian()
signal.signal(signal.SIGTERM, stop)
threading.Timer(float(sys.argv[2]), os.kill, [os.getpid(), signal.SIGTERM]).start()
try:
    with ray_session(home, 1, False):
        threading.Event().wait(20)
except Stop:
    print("stopped as told", flush=True)
"""


@pytest.mark.parametrize("after_s", [0.3, 1.5])
def test_a_signal_while_ray_starts_is_the_runs_own(tmp_path: Path, after_s: float) -> None:
    command = [sys.executable, "-c", START, str(tmp_path), str(after_s)]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "stopped as told"), done.stderr
    end = time.monotonic() + 60
    while left := [process for process in psutil.process_iter(["cmdline"]) if _of(process, tmp_path)]:
        assert time.monotonic() < end, left
        time.sleep(0.2)


def test_a_cluster_that_is_gone_is_an_error_and_not_the_end_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(TransientError, match="no Ray cluster responds at 127.0.0.1:9"), ray_session(tmp_path, 1, False):
        pass


def test_no_process_of_a_local_ray_is_left_though_its_parents_have_ended(tmp_path: Path) -> None:
    ray = LocalRay(tmp_path, 1)
    try:
        assert ":" in ray.address()
        leader = ray._process.pid
        end = time.monotonic() + 60
        while not (workers := [each for each in ray._processes() if each.name().startswith("ray::")]):
            assert time.monotonic() < end
            time.sleep(0.1)
        for worker in workers:
            worker.suspend()  # or it would end with its raylet
        for each in ray._processes():
            if each.pid == leader or each.name() == "raylet":
                each.kill()
    finally:
        ray.stop()
    assert ray._processes() == []
    assert [each for each in workers if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []


def test_a_ray_that_does_not_start_is_an_error_with_its_last_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray_process.py").write_text("import sys\nprint('7')\nprint('{}')\nsys.exit('no memory')")
    monkeypatch.setattr(local_ray, "__file__", str(tmp_path / "local_ray.py"))
    ray = LocalRay(tmp_path, 1)
    try:
        with pytest.raises(TransientError, match=r"Ray failed to start: its process ended; its .*:\nno memory"):
            ray.address()
    finally:
        ray.stop()


def _of(process: psutil.Process, home: Path) -> bool:
    return str(home) in " ".join(process.info["cmdline"] or []) and process.pid != os.getpid()
