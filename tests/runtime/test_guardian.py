"""What a process has started ends with it, however it ends."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from flows.server.services import stop_processes
from rl_core.runtime.guardian import TOKEN, remove_semaphores
from rl_core.runtime.process import Process

# Starts a child that ignores being asked to end, in a session of its own, whose parent has gone.
SCRIPT = """
import subprocess, sys, time
from rl_core.runtime.guardian import staging, start_guardian
start_guardian()
place = staging()
print(place.name, flush=True)
stubborn = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork() and os._exit(0); "
stubborn += "time.sleep(60)"
subprocess.run([sys.executable, "-c", stubborn], start_new_session=True)
print("ready", flush=True)
if {seconds} < 0:
    from rl_core.runtime.watchdog import Watchdog
    with Watchdog(3.0, lambda silent_s: None):
        time.sleep(60)
time.sleep({seconds})
"""


def started(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The guardian and what else has the process's token."""
    guardian = next(c for c in psutil.Process(process.pid).children() if "rl_core.runtime.guardian" in c.cmdline())
    token = guardian.environ()[TOKEN].rpartition(" ")[2]
    return [guardian, *(p for p in psutil.process_iter() if environ(p).get(TOKEN) == token)]


def environ(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except psutil.Error:
        return {}


def begun(seconds: float) -> tuple[subprocess.Popen[bytes], Path, list[psutil.Process]]:
    """A process with a guardian and a stubborn orphan, its temporary folder, and those two."""
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", SCRIPT.format(seconds=seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root})
    assert process.stdout
    folder = Path(process.stdout.readline().decode().strip())
    assert folder.is_dir() and process.stdout.readline() == b"ready\n"
    family = started(process)
    assert len(family) == 2 and family[1].ppid() != process.pid
    return process, folder, family


@pytest.mark.parametrize("seconds", [0.5, 60])
def test_orphans_end_when_their_run_has_ended_or_is_killed(seconds: float) -> None:
    process, folder, family = begun(seconds)
    if seconds > 1:
        process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=40)
    assert alive == [] and not folder.exists()


def test_a_fork_neither_hides_the_end_of_its_run_nor_survives_it() -> None:
    code = """
import os, time
from rl_core.runtime.guardian import start_guardian
start_guardian()
number = os.fork()
if number:
    print(number, flush=True)
time.sleep(60)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env)
    assert process.stdout
    fork = psutil.Process(int(process.stdout.readline()))
    family = [fork, *started(process)]
    assert len(family) == 2
    process.kill()
    process.wait()
    try:
        _, alive = psutil.wait_procs(family, timeout=40)
        assert alive == []
    finally:
        for left in family:
            with suppress(psutil.NoSuchProcess):
                left.kill()


def test_ending_a_run_with_its_children_leaves_the_guardian_its_work() -> None:
    process, folder, family = begun(60)
    stop_processes([Process.of(process.pid)])
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=40)
    assert alive == [] and not folder.exists()


def test_a_watchdog_that_ends_its_process_leaves_the_guardian_its_work() -> None:
    process, folder, family = begun(-1)
    assert process.wait() == 1
    _, alive = psutil.wait_procs(family, timeout=40)
    assert alive == [] and not folder.exists()


def test_semaphores_of_processes_that_are_gone_are_removed() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    files = [Path(f"/dev/shm/sem.loky-{number}-test") for number in (gone.pid, os.getpid())]
    for file in files:
        file.touch()
    remove_semaphores()
    assert [file.exists() for file in files] == [False, True]
    files[1].unlink()
