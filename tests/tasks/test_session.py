"""How a session ends says how its run ended, and what another process has begun is not ended with it."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support_runs import SIZES

from rl_core.config.compose import compose
from rl_core.errors import InputError, TransientError
from rl_core.storage.status import read_status
from rl_core.storage.store import Store
from tasks.runs.open_run import open_run
from tasks.runs.run import Run
from tasks.session import workers
from tasks.session.session import open_session


class Workers:
    """Stands for worker groups, which would need Ray."""

    ended = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def meet(self) -> None:
        pass

    def close(self) -> None:
        Workers.ended += 1


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "ray_session", lambda *_: nullcontext())
    monkeypatch.setattr(workers, "Roles", Workers)
    monkeypatch.setattr(Workers, "ended", 0)
    monkeypatch.setenv("RAY_ADDRESS", "a cluster")  # a local Ray's workers are killed with it


def opened(home: Path) -> Run:
    return open_run(compose("demo", SIZES), home, "x")


def taken_over(run: Run) -> None:
    """Another process holds the lease now."""
    store = Store(run.url)
    (name,) = store.listdir("leases")
    store.write_json("leases/000002.json", {**store.read_json(f"leases/{name}"), "token": "another"})


def test_a_holder_that_lost_its_lease_starts_and_ends_no_workers(tmp_path: Path) -> None:
    with open_session(opened(tmp_path)) as session:
        assert session.workers.start()
        taken_over(session.run)
        session.workers.drop()
        with pytest.raises(InputError, match="has taken over"):
            session.workers.start()
    assert Workers.ended == 0


def test_workers_end_with_the_session(tmp_path: Path) -> None:
    with open_session(opened(tmp_path)) as session:
        assert session.workers.start()
    assert Workers.ended == 1


def test_a_hang_is_told_though_its_stacks_cannot_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_session(opened(tmp_path)) as session:
        (tmp_path / "stalls").touch()  # no folder can be made there
        session.telemetry.on_hang(60)
        status = read_status(Store(session.run.url))
        assert status and status.state == "failed"
    said = capsys.readouterr().out
    assert "no progress for 60 s" in said and "stacks: not written: " in said


@pytest.mark.parametrize(("error", "state"), [(KeyboardInterrupt(), "stopped"), (KeyError("x"), "failed")])
def test_an_error_while_workers_end_does_not_hide_how_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, state: str
) -> None:
    def fail(_: Workers) -> None:
        raise RuntimeError("Ray is gone")

    monkeypatch.setattr(Workers, "close", fail)
    with pytest.raises(type(error)), open_session(opened(tmp_path)) as session:  # noqa: PT012
        assert session.workers.start()
        raise error
    assert read_status(Store(str(tmp_path / "runs/x"))).state == state  # type: ignore[union-attr]
    with open_session(opened(tmp_path)):  # the lease was given up
        pass


def test_of_a_refused_new_run_only_its_leases_are_left(tmp_path: Path) -> None:
    with pytest.raises(InputError), open_session(opened(tmp_path)):
        raise InputError("other rows", "none", "data.path", "correct it")
    assert Store(str(tmp_path / "runs/x")).listdir() == ["leases"]
    opened(tmp_path).close()
    with pytest.raises(InputError), open_session(opened(tmp_path)):
        raise InputError("other rows", "none", "data.path", "correct it")
    assert (tmp_path / "runs/x/run.json").exists(), "another process began it"


def test_files_that_no_run_has_written_are_neither_mixed_with_a_run_nor_removed(tmp_path: Path) -> None:
    rows = tmp_path / "runs/x/rows.parquet"
    rows.parent.mkdir(parents=True)
    rows.touch()
    with pytest.raises(InputError, match="an empty folder for a new run") as refusal:
        opened(tmp_path)
    assert refusal.value.seen == "rows.parquet" and [*rows.parent.iterdir()] == [rows]


def test_what_a_killed_start_leaves_does_not_hinder_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "runs/x"
    folder.mkdir(parents=True)
    for name in (f".probe-{'0' * 32}", f".{'1' * 32}.tmp"):
        (folder / name).touch()
    opened(tmp_path).close()


def test_an_outage_of_storage_at_the_end_keeps_neither_lease_nor_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> bool:
        raise TransientError("no answer")

    with (  # noqa: PT012
        monkeypatch.context() as outage,
        pytest.raises(InputError, match="other rows"),
        open_session(opened(tmp_path)),
    ):
        outage.setattr("tasks.session.session.has_started", fail)
        raise InputError("other rows", "none", "data.path", "correct it")
    opened(tmp_path).close()
