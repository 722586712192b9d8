"""One process works on a run, wherever the others run: in a folder and on an S3 server."""

import json
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support_servers import empty_bucket

from rl_core.errors import InputError
from rl_core.storage import run_files
from rl_core.storage.lease import Lease, this_machine
from rl_core.storage.store import Store

RENEW_S, EXPIRE_S = 0.2, 1.2
LONG_S = 30.0
"""An expiry that no holder misses who lives, however busy the machine is."""
HOLD = """
import sys, time
from rl_core.errors import InputError
from rl_core.storage.lease import Lease
from rl_core.storage.store import Store

url, name, machine = sys.argv[1:]
store = Store(url)
try:
    lease = Lease(store, "one", print, 0.2, 30.0, machine or None)
except InputError as error:
    sys.exit(f"refused: {error}")
print("taken", flush=True)
store, number = store.guarded(lease.check), 0
try:
    while True:
        store.write_bytes(f"written/{name}", str(number).encode())
        number += 1
        time.sleep(0.05)
except InputError as error:
    sys.exit(f"stopped: {error}")
"""


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "local":
        return Store(str(tmp_path))
    empty_bucket(request.getfixturevalue("s3_endpoint"), monkeypatch)
    return Store("s3://runs/team/one")


LEASES: list[Lease] = []


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    while LEASES:
        LEASES.pop().end()


def lease_of(
    store: Store, machine: str | None = None, told: list[str] | None = None, expire_s: float = LONG_S
) -> Lease:
    LEASES.append(Lease(store, "one", (told if told is not None else []).append, RENEW_S, expire_s, machine))
    return LEASES[-1]


def holder(store: Store, name: str, machine: str = "") -> subprocess.Popen[str]:
    """Another process that works on the run, on this machine or on one that goes by `machine`."""
    return subprocess.Popen([sys.executable, "-c", HOLD, store.url, name, machine], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)  # fmt: skip


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_second_is_told_who_holds_it_and_since_when(store: Store) -> None:
    lease = lease_of(store)
    for machine in (None, "another machine"):
        with pytest.raises(InputError) as caught:
            lease_of(store, machine)
        words = str(caught.value)
        assert f"process {lease._own.pid} on {lease._own.host} since {lease._own.since}" in words and store.url in words
    lease.check()
    lease.end()
    lease_of(store, "another machine").end()
    assert store.listdir(run_files.LEASES) == ["000001.json", "000002.json"]


def test_of_many_at_once_one_has_it(store: Store) -> None:
    lease_of(store).end()
    ready, got, refused = threading.Barrier(6), [], []

    def take(number: int) -> None:
        ready.wait()
        try:
            got.append(lease_of(store, f"machine {number}"))
        except InputError as error:
            refused.append(error)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1 and len(refused) == 5
    got[0].check()
    got[0].end()


def test_two_processes_race_for_it(store: Store) -> None:
    processes = [holder(store, str(number), f"machine {number}") for number in range(2)]
    try:
        said = sorted((line(process), number) for number, process in enumerate(processes))
        loser, winner = processes[said[0][1]], processes[said[1][1]]
        if said[0][0]:  # it watched the winner, whom it could not know to live
            assert "held by process" in said[0][0]
        assert said[1][0] == "taken" and loser.wait(60) == 1
        assert f"process {winner.pid} on" in loser.stderr.read()  # type: ignore[union-attr]
        written = [name for name in store.listdir("written") if not name.endswith(".tmp")]  # it goes on writing
        assert written == [str(processes.index(winner))] and winner.poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_one_that_died_here_is_followed_at_once(store: Store) -> None:
    process = holder(store, "a")
    assert line(process) == "taken"
    process.kill()
    process.wait()
    told: list[str] = []
    lease = lease_of(store, told=told)
    assert told == [], "it was watched"
    lease.end()


def test_one_that_fell_silent_is_followed_after_the_expiry_and_writes_no_more(store: Store) -> None:
    process = holder(store, "a", "another machine")
    try:
        assert line(process) == "taken"
        while not store.exists("written/a"):
            time.sleep(0.05)
        process.send_signal(signal.SIGSTOP)
        told: list[str] = []
        start = time.monotonic()
        lease = lease_of(store, told=told, expire_s=EXPIRE_S)
        assert EXPIRE_S <= time.monotonic() - start < LONG_S
        assert f"held by process {process.pid} on" in told[0] and "taken over in 1 s" in told[0]
        before = store.read_bytes("written/a")
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 1
        words = process.stderr.read()  # type: ignore[union-attr]
        assert words.startswith("stopped: ") and f"process {lease._own.pid} on" in words
        assert int(store.read_bytes("written/a")) <= int(before) + 1, "a write that had begun, and no other"
        lease.check()
        lease.end()
    finally:
        process.kill()
        process.wait()


def test_a_former_holder_neither_writes_nor_removes_and_leaves_the_lease_alone(store: Store) -> None:
    former = lease_of(store, "one machine")
    former._ended.set()  # its process sleeps
    former._thread.join()
    guarded = store.guarded(former.check)
    guarded.child("checkpoints").write_bytes("a", b"1")
    now = lease_of(store, "another machine", expire_s=EXPIRE_S)
    former._ended.clear()
    for write in (
        lambda: guarded.write_bytes("b", b"1"),
        lambda: guarded.remove("checkpoints"),
        lambda: guarded.child("checkpoints").commit_folder("step_000001", {}, []),
        lambda: guarded.put_file(__file__, "b", "c"),
    ):
        with pytest.raises(InputError, match="has taken over"):
            write()
    assert former.lost and not now.lost
    former.end()
    assert sorted(store.listdir()) == ["checkpoints", run_files.LEASES] and store.exists("checkpoints/a")
    assert not json.loads(store.read_bytes(f"{run_files.LEASES}/000002.json"))["ended"]
    now.check()
    now.end()


def test_a_former_holder_removes_nothing_after_it_lost_the_lease_on_the_way(store: Store) -> None:
    former = lease_of(store, "one machine")
    former._ended.set()  # its process sleeps
    former._thread.join()
    checks = iter(range(3))

    def check() -> None:
        if next(checks, None) is None and not store.exists(f"{run_files.LEASES}/000002.json"):
            store.write_bytes(f"{run_files.LEASES}/000002.json", b"{}")
        former.check()

    for number in range(6):
        store.write_bytes(f"step/actor/{number}", b"1")
    with pytest.raises(InputError, match="has taken over"):
        store.guarded(check, former.number).remove("step")
    assert len(store._files("step")) >= 4


def test_processes_of_a_former_holder_find_that_it_lost_the_lease(store: Store) -> None:
    former = lease_of(store, "one machine")
    former._ended.set()
    former._thread.join()
    worker: Store = pickle.loads(pickle.dumps(store.guarded(former.check, former.number)))
    assert worker.url == store.url and worker.holder == 1 and worker.child("a").holder == 1
    worker.write_bytes("a", b"1")
    now = lease_of(store, "another machine", expire_s=EXPIRE_S)
    for name in ("a", "c"):
        with pytest.raises(InputError, match="has taken over"):
            worker.write_bytes(name, b"2")
    with pytest.raises(InputError, match="has taken over"):
        worker.remove("a")
    assert store.read_bytes("a") == b"1"
    now.end()


def test_a_lease_is_renewed_all_the_time(store: Store) -> None:
    lease = lease_of(store, "one machine")
    deadline = time.monotonic() + LONG_S
    while json.loads(store.read_bytes(f"{run_files.LEASES}/000001.json"))["renewals"] < 3:
        assert time.monotonic() < deadline
        time.sleep(RENEW_S)
    lease.check()
    lease.end()


def test_a_holder_is_known_to_live_after_the_clock_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path))
    lease = lease_of(store)
    started = psutil.Process.create_time
    # The kernel's boot time, which start times in seconds are based on, moves with the clock.
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: started(self) + 3600)
    with pytest.raises(InputError, match="held by process"):
        lease_of(store)
    lease.check()


def test_a_lease_of_an_earlier_version_is_watched(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    old = {"token": "t", "host": "h", "machine": this_machine(), "pid": 1, "started": 1.7e9, "since": "then"}
    store.write_json(f"{run_files.LEASES}/000001.json", old)
    told: list[str] = []
    lease_of(store, told=told, expire_s=EXPIRE_S).end()
    assert "held by process 1 on h" in told[0]


def test_a_torn_lease_is_watched_like_any_other(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write_bytes(f"{run_files.LEASES}/000001.json", b'{"token": ')
    start = time.monotonic()
    lease_of(store, expire_s=EXPIRE_S).end()
    assert time.monotonic() - start >= EXPIRE_S


def test_this_machine_is_the_same_for_all_its_processes() -> None:
    command = [sys.executable, "-c", "from rl_core.storage.lease import this_machine; print(this_machine())"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == this_machine() != ""
