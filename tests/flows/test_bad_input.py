"""A mistake costs seconds: one message with expected, seen, where and fix, exit code 2, no traceback."""

import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support_flows import rollforward

from flows.preflight import check_cluster, check_prefect, preflight
from flows.server.ports import check_port
from rl_core.config.compose import compose
from rl_core.errors import InputError

ROW = {"data_source": "exact", "prompt": [{"role": "user", "content": "2 1"}], "reward_model": {"ground_truth": "1 2"}}
SHORT = ["data.max_prompt_length=16", "data.max_response_length=8", "data.train_batch_size=2"]


def refused(home: Path, *arguments: str) -> str:
    done = rollforward(home, *arguments, timeout=120)
    assert done.code == 2, done.output
    assert "Traceback" not in done.output
    for part in ("expected:", "seen:", "where:", "fix:"):
        assert part in done.output
    return done.output


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dmo"], "demo"),
        (["demo", "trainer.stepz=3"], "trainer.steps"),
        (["demo", "trainer.steps=many"], "trainer.steps"),
        (["demo", "rollout.n=1"], "rollout.n"),
        (["demo", "model.path=/no/such/model"], "/no/such/model"),
        (["demo", "registry.model_name=Qwen/Qwen3-rl"], "must not be blank or contain /"),
        (["demo", "--resume"], "resume"),
        (["demo", "--run", "../x"], "run name"),
    ],
)
def test_settings_that_cannot_work(home: Path, arguments: list[str], words: str) -> None:
    runs = set(home.glob("runs/*"))
    assert words in refused(home, "run", *arguments)
    assert set(home.glob("runs/*")) == runs


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["data.source=gsm9k"], "gsm8k"),
        (["algorithm.overlong_buffer=9"], "every response would be penalised as overlong"),
        (["reward.function=no_module_here:score"], "no_module_here"),
        (["reward.extra_functions=[absent=0.5]"], "absent"),
        (["tracking.uri=http://127.0.0.1:9"], "MLflow"),
        (["agent.tools=[calculater]"], "did you mean calculator"),
        (["agent.environment=no_module_here:Game"], "ModuleNotFoundError"),
        (["agent.mcp_servers=[http://127.0.0.1:9/mcp]"], "127.0.0.1:9 did not list its tools"),
        (["rollout={tensor_parallel_size: 2, ranks_per_node: 4}", "model.tiny.heads=2"], "engines of 2"),
    ],
)
def test_parts_that_are_not_there(tmp_path: Path, settings: list[str], words: str) -> None:
    composed = compose("demo", settings)
    with pytest.raises(InputError) as refusal:
        preflight(composed, tmp_path)
    assert words in str(refusal.value)


def test_a_scorer_with_a_mistake_ends_before_anything_starts(home: Path, tmp_path: Path) -> None:
    (tmp_path / "my_mistake.py").write_text("def score(response, row):\n    return 'right'\n")
    runs = set(home.glob("runs/*"))
    done = rollforward(home, "run", "demo", "reward.function=my_mistake:score", folder=tmp_path, timeout=120)
    assert done.code == 2 and "Traceback" not in done.output, done.output
    for part in ("expected: a score from `my_mistake:score`", "returned 'right'", "train row 1", "correct the scorer"):
        assert part in done.output
    assert set(home.glob("runs/*")) == runs


def test_a_ray_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(InputError, match="RAY_ADDRESS=127.0.0.1:9"):
        check_cluster()
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    check_cluster()


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/api", "127.0.0.1:9"])
def test_a_prefect_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("PREFECT_API_URL", url)
    with pytest.raises(InputError, match=f"PREFECT_API_URL={url}"):
        check_prefect()


def test_files_of_the_working_directory_do_not_take_the_place_of_ours(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("raise SystemError('not this one')")
    done = rollforward(tmp_path / "home", "run", "demo", "--resume", folder=tmp_path)
    assert done.code == 2 and "a run to resume" in done.output, done.output


def test_a_home_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "ROLLFORWARD_HOME" in refused(tmp_path / "file/home", "run", "demo")


def test_a_tokenizer_without_a_chat_template(tmp_path: Path) -> None:
    from rl_core.config.schema import TinyModelConfig
    from rl_core.models.tiny import save_tiny_model

    save_tiny_model(tmp_path, TinyModelConfig(), 32, 0)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="chat template"):
        preflight(compose("demo", [f"model.path={tmp_path}"]), tmp_path)


def test_a_port_in_use(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refused(home, "ui", "--port", str(port))


def test_a_port_that_is_none() -> None:
    with pytest.raises(InputError, match="--mlflow-port 70000"):
        check_port(70000, "--mlflow-port")


@pytest.mark.parametrize("fault", ["missing", "empty", "column", "long"])
def test_rows_that_cannot_be_used(home: Path, tmp_path: Path, fault: str) -> None:
    rows = [ROW] * 4
    if fault == "empty":
        rows = []
    if fault == "column":
        rows = [{key: row[key] for key in ("data_source", "prompt")} for row in rows]
    if fault == "long":
        rows = [*rows, {**ROW, "prompt": [{"role": "user", "content": "1 " * 40}]}]
    held_out = parquet(tmp_path / "val.parquet", [{**ROW, "prompt": [{"role": "user", "content": "4 3"}]}])
    path = str(tmp_path / "nothing.parquet") if fault == "missing" else parquet(tmp_path / "train.parquet", rows)
    settings = ["data.source=files", f"data.path={path}", f"data.val_path={held_out}", *SHORT]
    output = refused(home, "run", "grpo", "--run", f"rows-{fault}", *settings)
    words = {"missing": "nothing.parquet", "empty": "row", "column": "reward_model", "long": "row 5"}
    assert words[fault] in output
    assert not (home / f"runs/rows-{fault}/checkpoints").exists()


def test_config_prints_and_starts_nothing(tmp_path: Path) -> None:
    done = rollforward(tmp_path / "none", "config", "demo", "trainer.steps=7")
    assert done.code == 0 and done.seconds < 5
    assert "override" in done.output and "recipe demo" in done.output
    assert not (tmp_path / "none").exists()
