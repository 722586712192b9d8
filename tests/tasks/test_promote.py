"""The alias champion moves when the gate allows it, against an MLflow in a file and evaluations that are there."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support_gate import evaluation

from rl_core.config.compose import compose
from rl_core.errors import InputError
from rl_core.evaluation import evaluate as scoring
from rl_core.storage import run_files
from rl_core.storage.store import Store
from tasks.evaluate import champion_result, evaluate
from tasks.prepare_data import prepare_data
from tasks.promote import last_metrics, promote
from tasks.registry.registry import Registry
from tasks.runs.open_run import open_run
from tasks.runs.report_page import run_page, run_summary
from tasks.session.session import Session, open_session
from tasks.tracking.tracker import mlflow_client

BAD, GOOD = [1.0] * 10 + [0.0] * 22, [1.0] * 30 + [0.0] * 2
FOUND = {"log_prob_difference": 1e-6, "greedy_gap": 0.0}
SETTINGS = ["data.val_rows=32", "data.train_rows=64", "model.tiny.layers=1"]


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


@contextmanager
def session_of(home: Path, name: str, *settings: str) -> Iterator[Session]:
    run = open_run(compose("demo", [*SETTINGS, *settings]), home, name)  # home is where the database of `sqlite_uri` is
    with open_session(run) as session:
        prepare_data.__wrapped__(session)  # type: ignore[attr-defined]
        yield session


def add_version(session: Session, greedy: list[float], **more: Any) -> str:
    """A registered version with such an evaluation at step 1, which the other runs can find."""
    weights = f"weights of {session.run.name}"
    folder = model_folder(session.run.home / session.run.name)
    version = session.registry.register(folder, session.tracking.tracker.run_id, weights, {}, {})
    data, settings = scoring.rows_hash(session.assets.val_rows.rows), scoring.settings_of(session.config)
    result = scoring.cached(
        Store(str(session.run.home / "runs")), weights, data, settings, lambda: evaluation(greedy, **more)
    )
    result |= {"weights": weights, "data": data, "settings": settings}
    session.store.write_json(run_files.evaluation(1), result)
    session.store.write_json(run_files.RELOAD, {"version": version, **FOUND})
    return version


def promoted(session: Session, version: str) -> bool:
    return "champion" in promote.__wrapped__(session, version, 1)  # type: ignore[attr-defined]


def run(home: Path, name: str, greedy: list[float], *settings: str, **more: Any) -> bool:
    with session_of(home, name, *settings) as session:
        return promoted(session, add_version(session, greedy, **more))


def tags(home: Path, version: str) -> dict[str, str]:
    return dict(mlflow_client(f"sqlite:///{home}/mlflow.db").get_model_version("rollforward-demo", version).tags)


def aliases(home: Path) -> dict[str, str]:
    return Registry(f"sqlite:///{home}/mlflow.db", "rollforward-demo").aliases()


def test_a_run_that_is_shown_again_undoes_nothing(sqlite_uri: str, tmp_path: Path) -> None:
    assert run(tmp_path, "first", BAD) and run(tmp_path, "better", GOOD)
    registry = Registry(f"sqlite:///{tmp_path}/mlflow.db", "rollforward-demo")
    for name, version in (("first", "1"), ("better", "2")):
        with session_of(tmp_path, name) as session:
            assert promoted(session, version) == (name == "better")
    assert aliases(tmp_path)["champion"] == "2" and tags(tmp_path, "1")["rollforward.gate"] == "promoted"
    registry.rollback()
    with session_of(tmp_path, "better") as session:
        assert not promoted(session, "2")
    assert aliases(tmp_path)["champion"] == "1" and len(registry.moves()) == 3


def test_versions_become_champion_one_after_the_other(sqlite_uri: str, tmp_path: Path) -> None:
    assert run(tmp_path, "first", BAD) and aliases(tmp_path) == {"champion": "1"}
    assert not run(tmp_path, "same", BAD, "trainer.save_every=2")
    assert aliases(tmp_path) == {"champion": "1"} and tags(tmp_path, "2")["rollforward.gate"] == "refused"
    assert run(tmp_path, "better", GOOD, "trainer.save_every=3")
    assert aliases(tmp_path) == {"champion": "3", "previous": "1"}
    assert tags(tmp_path, "3")["rollforward.gate"] == "promoted"
    assert tags(tmp_path, "3")["rollforward.gate_champion"] == "1"
    kept = json.loads((tmp_path / "runs/better" / run_files.DECISION).read_text())
    assert kept["promote"] and kept["champion"] == "1" and kept["checks"][0]["name"] == "better"
    with session_of(tmp_path, "better", "trainer.save_every=3") as session:
        assert promoted(session, "3"), "a resumed run finds its version promoted"
    assert tags(tmp_path, "3")["rollforward.gate_champion"] == "1", "and does not decide again, without a champion"


def test_a_dry_run_off_and_approval_move_nothing(sqlite_uri: str, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    assert not run(tmp_path, "constant", [0.0] * 32, "gate.mode=dry_run")
    assert tags(tmp_path, "1")["rollforward.gate"] == "would wait"
    for mode in ("gate.mode=off", "gate.mode=dry_run", "gate.approval=true"):
        assert not run(tmp_path, mode.partition("=")[2], GOOD, mode)
        version = str(len(seen) + 2)
        seen[mode] = tags(tmp_path, version).get("rollforward.gate")
    assert list(seen.values()) == [None, "would promote", "waiting"]
    assert aliases(tmp_path) == {}


def test_a_reload_that_failed_is_a_failed_check(sqlite_uri: str, tmp_path: Path) -> None:
    with session_of(tmp_path, "broken") as session:
        version = add_version(session, GOOD)
        session.store.write_json(run_files.RELOAD, {"version": version, "problem": "exit code 1"})
        assert not promoted(session, version)
        assert "exit code 1" in tags(tmp_path, version)["rollforward.gate_checks"]


def test_the_limit_of_the_reload_is_that_of_the_canary(sqlite_uri: str, tmp_path: Path) -> None:
    with session_of(tmp_path, "rounded") as session:
        version = add_version(session, GOOD)
        found = {"version": version, "log_prob_difference": 0.3, "greedy_gap": 0.5}
        session.store.write_json(run_files.RELOAD, found)  # as of a run that did not record the rounding error
        assert not promoted(session, version)
        session.store.write_json(run_files.RELOAD, {**found, "rounding": 0.1})
        assert promoted(session, version)


def test_a_champion_that_cannot_be_scored_stays(
    sqlite_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tmp_path, "first", BAD)
    with session_of(tmp_path, "second", "trainer.seed=1") as session:  # other rows, so nothing is kept of the first

        def refused(folder: Path) -> None:
            raise InputError("a longer context", "8", str(folder), "take another")

        monkeypatch.setattr(session.workers, "load_model", refused)
        version = add_version(session, GOOD)
        assert not promoted(session, version) and aliases(tmp_path) == {"champion": "1"}
        result = champion_result(session, version)
        assert result and result["version"] == "1" and "a longer context" in result["problem"]


def test_guards_look_at_the_mean_of_the_steps_that_have_the_metric() -> None:
    records = [{"metrics": {"kl/ref": float(step), **({"once": 1.0} if step == 19 else {})}} for step in range(10, 20)]
    assert last_metrics(records) == {"kl/ref": 14.5, "once": 1.0}


def test_a_first_version_no_better_than_a_constant_answer_waits_for_a_user(sqlite_uri: str, tmp_path: Path) -> None:
    assert not run(tmp_path, "first", [0.0] * 32) and aliases(tmp_path) == {}
    assert tags(tmp_path, "1")["rollforward.gate"] == "waiting"
    assert "exceed that of the best constant answer" in tags(tmp_path, "1")["rollforward.gate_checks"]
    kept = json.loads((tmp_path / "runs/first" / run_files.CONSTANT).read_text())
    assert 0 < kept["score"] < 1
    (tmp_path / "runs/first" / run_files.CONSTANT).write_text(json.dumps({**kept, "score": None}))
    with session_of(tmp_path, "first") as session:
        assert not promoted(session, "1")
    assert "is unknown" in tags(tmp_path, "1")["rollforward.gate_checks"], "a retry decides by the stored score"
    registry = Registry(f"sqlite:///{tmp_path}/mlflow.db", "rollforward-demo")
    registry.promote_manually("1", approve=True)
    assert aliases(tmp_path) == {"champion": "1"}


def test_training_that_changed_nothing_is_warned_of_once_everywhere(
    sqlite_uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = {"group/equal_share": 1.0, "score/mean": 0.0, "time/step": 0.1, "actor/grad_norm": 0.0}
    with session_of(tmp_path, "flat", "actor.optim.warmup_steps=1000") as session:
        for number in range(1, 45):
            # Flat twice, with other scores.
            metrics = step | {"group/equal_share": float(number != 22), "score/mean": float(number > 22)}
            session.telemetry.on_step({"step": number, "metrics": metrics})
        for number in (0, 1):
            session.store.write_json(run_files.evaluation(number), evaluation([0.0] * 32) | {"samples": []})
        for _ in range(2):  # a resumed run repeats the stage
            evaluate.__wrapped__(session, 1)  # type: ignore[attr-defined]
        said, page, summary = capsys.readouterr().out, run_page(session.store, {}), run_summary(session.store, {})
    for text in (
        "no rewards differed",
        "the scores did not move: greedy 0.000",
        "actor.optim.warmup_steps=1000 is longer",
    ):
        assert said.count(text) == summary.count(text) == 1 and text in page, text
