"""A process is known by its number and its start, whatever happens to the clock."""

import os
import subprocess

import psutil
import pytest

from rl_core.runtime.process import Process, boot_id


def test_a_clock_that_is_set_changes_nothing(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    known, started = Process.of(sleeper.pid), psutil.Process.create_time
    for step in (-3600, 3600):
        monkeypatch.setattr(psutil.Process, "create_time", lambda self, step=step: started(self) + step)
        found = known.find()
        assert found and found.pid == sleeper.pid and Process.of(sleeper.pid) == known


def test_another_process_with_the_number_and_one_that_ended_are_not_found(sleeper: subprocess.Popen[bytes]) -> None:
    known = Process.of(sleeper.pid)
    boot, ticks = known.started.split()
    assert boot == boot_id() != ""
    assert Process(known.pid, f"{boot} {int(ticks) - 1}").find() is None
    assert Process(known.pid, f"another-boot {ticks}").find() is None
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert known.find() is None, "a zombie"
    sleeper.wait()
    assert known.find() is None
    with pytest.raises(psutil.NoSuchProcess):
        Process.of(sleeper.pid)
