"""How a session ends says how its run ended, and what another process has begun is not ended with it."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support_runs import SIZES

from rl_core.config.compose import compose
from rl_core.errors import InputError
from rl_core.storage.status import read_status
from rl_core.storage.store import Store
from tasks.runs.open_run import open_run
from tasks.runs.run import Run
from tasks.session import workers
from tasks.session.session import open_session


class Workers:
    """Stands for worker groups, which would need Ray."""

    ended = 0

    def __init__(self, *_: Any) -> None:
        pass

    def close(self) -> None:
        Workers.ended += 1


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "ray_session", lambda *_: nullcontext())
    monkeypatch.setattr(workers, "Roles", Workers)
    monkeypatch.setattr(Workers, "ended", 0)


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
