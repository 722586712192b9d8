"""Two homes, as of two machines, that share the storage of their runs: one of them works on a run."""

import re
from pathlib import Path

import pytest

from rl_core.config.compose import compose
from rl_core.errors import InputError
from rl_core.storage import run_files
from rl_core.storage.lease import Lease
from rl_core.storage.store import Store
from tasks.runs.open_run import open_run
from tasks.runs.run import Run
from tasks.session.session import open_session


def opened(tmp_path: Path, home: str) -> Run:
    return open_run(compose("demo", [f"storage.root={tmp_path}/shared", "storage.timeout_s=7"]), tmp_path / home, "one")


def test_the_second_is_told_who_works_on_the_run_and_since_when(tmp_path: Path) -> None:
    first = opened(tmp_path, "a")
    assert first.store.timeout_s == 7
    with pytest.raises(InputError) as caught:
        opened(tmp_path, "b")
    assert re.search(r"process \d+ on \S+ since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+", caught.value.seen)
    assert caught.value.where == f"run one in {tmp_path}/shared/one"
    first.close()
    opened(tmp_path, "b").close()


def test_a_session_whose_run_was_taken_over_ends_and_writes_nothing_more(tmp_path: Path) -> None:
    store = Store(f"{tmp_path}/shared/one")
    run = opened(tmp_path, "a")
    with pytest.raises(InputError, match="has taken over"), open_session(run) as session:
        run.lease._ended.set()  # it sleeps
        run.lease._thread.join()
        after = Lease(store, "one", expire_s=0.3, renew_s=0.1, machine="another machine")
        before = store.read_bytes("status.json")
        session.telemetry.warn("never to be read")
    assert store.read_bytes("status.json") == before and not store.exists("notes.json")
    after.check()
    after.end()
    assert store.listdir(run_files.LEASES) == ["000001.json", "000002.json"]
