"""A run's status file says what its process is doing, and readers know whether that process still lives."""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.runtime.process import Process
from rl_core.storage import run_files, status
from rl_core.storage.status import WAITS, Status, StatusWriter, read_status
from rl_core.storage.store import Store
from rl_core.trainer.metrics import Phases

SOURCES = Path(status.__file__).parents[1]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


@pytest.fixture
def writer(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[StatusWriter]:
    monkeypatch.setattr(status, "LEAST_S", 0.05)
    monkeypatch.setattr(status, "BEAT_S", 0.3)
    made = StatusWriter(store, steps=10, step=2)
    yield made
    if not made._ended.is_set():
        made.close("finished")


def soon(store: Store, **wanted: object) -> Status:
    """What the file says once it says this."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        seen = read_status(store)
        if seen and all(getattr(seen, name) == value for name, value in wanted.items()):
            return seen
        time.sleep(0.01)
    raise AssertionError(read_status(store))


def test_stage_step_and_phase_are_there_a_moment_later(store: Store, writer: StatusWriter) -> None:
    assert (first := read_status(store)) and (first.step, first.steps, first.pid) == (2, 10, os.getpid())
    writer.stage("train")
    with Phases(lambda name: writer.phase(3, name))("update"):
        seen = soon(store, stage="train", phase="update", step=2)
    writer.update(step=3, seconds_per_step=2.0)
    assert soon(store, step=3).seconds_left == 14.0
    assert seen.lives and seen.state_now == "running" and time.time() - seen.phase_since < 60


def test_many_changes_are_few_writes_and_silence_still_beats(
    store: Store, writer: StatusWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[float] = []
    monkeypatch.setattr(writer._store, "write_bytes", lambda rel, data: written.append(time.monotonic()))
    start, changes = time.monotonic(), 0
    while len(written) < 4 and time.monotonic() - start < 60:
        writer.phase(3, "rollout")
        changes += 1
        time.sleep(0.0005)
    assert changes > 4 and written[-1] - written[0] >= 0.9 * 3 * status.LEAST_S
    while len(written) < 7 and time.monotonic() - start < 60:
        time.sleep(0.01)
    assert written[6] - written[5] >= 0.9 * status.BEAT_S, "one in a while, though nothing changes"


def test_a_caller_never_waits_for_storage(writer: StatusWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = threading.Event()
    monkeypatch.setattr(writer._store, "write_bytes", lambda rel, data: slow.wait(120))
    writer.phase(3, "rollout")
    time.sleep(0.2)
    start = time.monotonic()
    for _ in range(1000):
        writer.phase(3, "update")
    assert time.monotonic() - start < 60
    slow.set()


def test_an_outage_is_told_once_and_ends_nothing(
    store: Store,
    writer: StatusWriter,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / run_files.STATUS).unlink()
    (tmp_path / run_files.STATUS).mkdir()
    with caplog.at_level(logging.WARNING):
        beats, write = list[float](), writer._write

        def noted() -> None:
            write()
            beats.append(time.time())

        monkeypatch.setattr(writer, "_write", noted)
        until = time.monotonic() + 60
        while len(beats) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    assert len(caplog.records) == 1 and "rollforward status" in caplog.text
    (tmp_path / run_files.STATUS).rmdir()
    writer.close("failed", "no space")
    assert (end := read_status(store)) and (end.state_now, end.error) == ("failed", "no space")


def test_a_killed_process_has_stopped(store: Store) -> None:
    code = (
        "import sys, time; from rl_core.storage.store import Store; from rl_core.storage.status import StatusWriter\n"
        "StatusWriter(Store(sys.argv[1]), 10, 2).stage('train'); print('there', flush=True); time.sleep(60)"
    )
    env = {**os.environ, "PYTHONPATH": str(SOURCES.parent)}
    child = subprocess.Popen([sys.executable, "-c", code, store.root], stdout=subprocess.PIPE, env=env)
    assert child.stdout and child.stdout.readline()
    alive = soon(store, stage="train")
    assert alive.pid == child.pid and str(alive.state_now) == "running"
    child.kill()
    end = time.monotonic() + 60
    while str(alive.state_now) == "running" and time.monotonic() < end:
        time.sleep(0.05)
    assert str(alive.state_now) == "stopped", "though nobody has asked yet how it ended"
    child.wait()
    assert alive.state_now == "stopped"


def test_a_later_process_with_the_same_number_is_another_one_and_other_machines_are_known_by_their_beat() -> None:
    now, own = time.time(), Process.of(os.getpid())
    assert Status(pid=own.pid, started=own.started, host=socket.gethostname(), beat=now - 1e6).lives
    assert not Status(pid=own.pid, started="boot 12", host=socket.gethostname(), beat=now).lives
    assert not Status(pid=own.pid, host=socket.gethostname(), beat=now - 300).lives, "as earlier versions wrote it"
    assert Status(pid=1, host="elsewhere", beat=now - 5).lives
    assert not Status(pid=1, host="elsewhere", beat=now - 300).lives


@given(st.binary(max_size=60) | st.sampled_from([b"{}", b"[]", b'{"step": "x"}', b'{"pid": 1e99}', b'{"beat": NaN}']))
def test_what_is_no_status_is_none(content: bytes) -> None:
    store = Store("memory://status-test")
    store.write_bytes(run_files.STATUS, content)
    seen = read_status(store)
    assert seen is None or seen.state_now in ("running", "stopped", "finished", "failed")


def test_every_phase_of_the_loop_says_who_waits() -> None:
    text = (SOURCES / "trainer/trainer.py").read_text() + (SOURCES / "trainer/sampler.py").read_text()
    assert {part.split('"')[0] for part in text.split('with phase("')[1:]} == set(WAITS)
