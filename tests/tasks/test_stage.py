"""Which failures are repeated, and what a person is told of the last one."""

from pathlib import Path

import pytest
from prefect.states import Failed
from support_runs import SIZES

from rl_core.config.compose import compose
from rl_core.errors import InputError, TrainingError, TransientError, WorkerError, WorkerLost
from tasks.runs.open_run import open_run
from tasks.session.session import open_session
from tasks.stage import _ending, _given_up, is_transient

ERRORS = {
    TransientError("storage"): True,
    WorkerLost("rank 1"): True,
    WorkerError("ZeroDivisionError"): False,
    TrainingError("not finite"): False,
    InputError("a", "b", "c", "d"): False,
    ZeroDivisionError(): False,
}


@pytest.mark.parametrize(("error", "repeated"), ERRORS.items(), ids=[type(error).__name__ for error in ERRORS])
def test_only_what_may_pass_is_repeated(error: Exception, repeated: bool) -> None:
    assert is_transient(None, None, Failed(data=error)) == repeated  # type: ignore[arg-type]


def failed(home: Path, error: Exception, *settings: str, step: int = 0) -> list[str]:
    """What is said of an error that ends a run, whose failed step is kept if there is one."""
    run = open_run(compose("demo", [*SIZES, *settings]), home, "broken")
    with pytest.raises(type(error)) as raised, open_session(run) as session:  # noqa: PT012
        if step:
            session.store.write_json(f"failed/step_{step:06d}.json", {"step": step, "error": "x", "metrics": {}})
        raise error
    return [line for note in getattr(raised.value, "__notes__", []) for line in note.splitlines()]


def test_the_end_of_a_run_says_what_to_type(tmp_path: Path) -> None:
    assert failed(tmp_path / "a", TransientError("lost")) == []
    again = "to replay the failed step: rollforward replay broken 1"
    assert failed(tmp_path / "b", WorkerError("broke"), step=1) == [again]
    root = f"{tmp_path}/elsewhere"
    assert failed(tmp_path / "c", WorkerError("broke"), f"storage.root={root}", step=1) == [
        again.replace("broken 1", f"{root}/broken 1")
    ]  # fmt: skip
    assert failed(tmp_path / "d", InputError("a", "b", "c", "d")) == []


def test_attempts_are_counted_and_compared(tmp_path: Path) -> None:
    with open_session(open_run(compose("demo", SIZES), tmp_path, "counted")) as session:
        assert _ending(session, TransientError("storage")) == "TransientError"
        session.telemetry.status.phase(12, "update")
        same = _ending(session, WorkerLost("rank 1"))
    assert _given_up("train", [same] * 3) == (
        "train failed 3 times (trainer.max_attempts=3): all with WorkerLost at step 12, update"
    )
    assert _given_up("train", [same, "TransientError"]).endswith(": WorkerLost at step 12, update; TransientError")
