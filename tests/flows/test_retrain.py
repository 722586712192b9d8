"""When there is something to retrain on, with which settings, and which attempt at a flow run may go on."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from flows import attempts
from flows.attempts import begin_attempt
from flows.home import prepare_environment
from flows.retrain import limit_overrides, plan_retraining
from flows.server.service_file import Service, running_services, write_services
from rl_core.config.compose import compose, extend
from rl_core.data.identity import data_identity
from rl_core.errors import InputError, TrainingError, TransientError
from rl_core.runtime.private import read_secret
from rl_core.runtime.process import Process


def identity(*settings: str) -> str:
    config = compose("demo", settings).config
    return data_identity(config.data, config.trainer.seed)


def rows(folder: Path, text: str = "1 + 1") -> list[str]:
    folder.mkdir()
    for name in ("train", "val"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"prompt": text, "ground_truth": name}))
    return [
        "data.source=files", f"data.path={folder}/train.jsonl", f"data.val_path={folder}/val.jsonl",
    ]  # fmt: skip


def test_files_are_new_data_only_when_their_content_is(tmp_path: Path) -> None:
    settings = rows(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    moved = [setting.replace("/first/", "/copy/") for setting in settings]
    assert identity(*settings) == identity(*moved)
    assert identity(*settings) != identity(*rows(tmp_path / "other", "1 + 2"))


def test_made_rows_are_new_data_when_their_settings_or_the_seed_are() -> None:
    assert identity() == identity("trainer.steps=3", "actor.optim.lr=1e-4")
    assert len({identity(), identity("data.difficulty=6"), identity("trainer.seed=1")}) == 3


def test_a_date_goes_into_the_paths_that_ask_for_it(tmp_path: Path) -> None:
    settings = ["data.source=files", "data.path=rows/{as_of}/*.jsonl", "data.val_path=held_out.jsonl"]
    composed = compose("demo", settings)
    config = extend(composed, limit_overrides(composed.config, date(2026, 2, 3), None)).config
    assert (config.data.path, config.data.val_path) == ("rows/2026-02-03/*.jsonl", "held_out.jsonl")
    with pytest.raises(InputError, match="as_of"):
        limit_overrides(compose("demo").config, date(2026, 2, 3), None)


def test_a_limit_lowers_the_steps_only() -> None:
    assert limit_overrides(compose("demo").config, None, 7) == ["trainer.steps=7"]
    assert limit_overrides(compose("demo", ["trainer.steps=5"]).config, None, 7) == ["trainer.steps=5"]


def test_there_is_a_reason_to_train_once_unless_something_triggers_it(tmp_path: Path) -> None:
    def plan(trigger: str | None, *settings: str) -> dict[str, Any]:
        return plan_retraining(compose("demo", settings).config, tmp_path, "champion", trigger)

    first = plan(None)
    assert first["reason"] == "first retraining of this model"
    record = tmp_path / "runs/retrain/rollforward-demo.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"data": first["data"], "run": "first"}))
    assert plan(None)["reason"] is None and plan(None)["version"] is None
    assert plan("a person")["reason"] == "trigger: a person"
    assert plan(None, "data.difficulty=4")["reason"] == "the data has changed"


@pytest.fixture
def second_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]) -> Path:
    """The file of a flow run whose first attempt still lives."""
    monkeypatch.setenv("ROLLFORWARD_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "a-flow-run")
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", "2")
    file = tmp_path / "attempts/a-flow-run.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"process": asdict(Process.of(sleeper.pid))}))
    return file


def test_a_new_attempt_ends_the_earlier_one(second_attempt: Path, sleeper: subprocess.Popen[bytes]) -> None:
    begin_attempt(max_attempts=2)
    sleeper.wait(timeout=60)


def test_what_an_attempt_decided_stands_on_other_machines_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "RETRY_DELAYS_S", (0.0,))
    config = compose("demo", [f"storage.root={tmp_path}/shared"]).config
    answers: Iterator[TransientError | dict[str, Any]] = iter([TransientError("MLflow is away"), {"stop_at": 1.5}])

    def decide() -> dict[str, Any]:
        if isinstance(answer := next(answers), TransientError):
            raise answer
        return answer

    for machine in (1, 2):
        attempt = attempts.Attempt(tmp_path / f"home {machine}", "a-flow-run", machine)
        assert attempt.decide_once(config, decide) == {"stop_at": 1.5}


def test_attempts_have_an_end(second_attempt: Path, sleeper: subprocess.Popen[bytes]) -> None:
    with pytest.raises(TrainingError, match=r"attempt 2 \(max_attempts=1\)"):
        begin_attempt(max_attempts=1)
    assert sleeper.poll() is None


def test_services_that_run_are_used_and_those_of_an_earlier_boot_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]
) -> None:
    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    now = Process.of(sleeper.pid)
    stale = Process(now.pid, "another-boot " + now.started.split()[1])
    write_services(tmp_path, {"prefect": Service(now, "http://p/api", ""), "mlflow": Service(stale, "http://m", "")})
    assert set(running_services(tmp_path)) == {"prefect"}
    prepare_environment(tmp_path)

    assert os.environ["PREFECT_API_URL"] == "http://p/api" and "MLFLOW_TRACKING_URI" not in os.environ
    assert os.environ["PREFECT_API_AUTH_STRING"] == read_secret(tmp_path, "servers")

    # The secret of the home folder is sent to no other server.
    os.environ["PREFECT_API_URL"] = "http://another/api"
    prepare_environment(tmp_path)
    assert "PREFECT_API_AUTH_STRING" not in os.environ
