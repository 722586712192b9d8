"""A mistake costs seconds: one message with expected, seen, where and fix, exit code 2, no traceback, and no run."""

import json
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support_flows import Result, rollforward

from flows.first_checks import check_cluster, check_prefect, check_rows, first_checks
from flows.preflight import preflight
from flows.server.ports import check_port
from rl_core.config.compose import compose
from rl_core.data.row_counts import MAX_NAMES
from rl_core.data.sources import files as source_files
from rl_core.errors import InputError, TransientError

ROW = {"data_source": "exact", "prompt": [{"role": "user", "content": "2 1"}], "reward_model": {"ground_truth": "1 2"}}
HELD_OUT = {**ROW, "prompt": [{"role": "user", "content": "4 3"}]}
SHORT = ["data.max_prompt_length=16", "data.max_response_length=8", "data.train_batch_size=2"]
MOST_CPU_S = 10.0
"""Of a refused command and all that it started; twice what it takes, since a busy machine counts more."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory whose home folder no run has used."""
    return tmp_path_factory.mktemp("mistakes")


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def files(place: Path, train: list[dict[str, Any]], held_out: list[dict[str, Any]] | None = None) -> list[str]:
    """Settings of a run on these rows."""
    paths = parquet(place / "train.parquet", train), parquet(place / "val.parquet", held_out or [HELD_OUT])
    return ["data.source=files", f"data.path={paths[0]}", f"data.val_path={paths[1]}", *SHORT]


def without_truth(place: Path) -> list[str]:
    return files(place, [{key: ROW[key] for key in ("data_source", "prompt")}] * 4)


def broken_scorer(place: Path) -> list[str]:
    (place / "my_mistake.py").write_text("def score(response, row):\n    return 'right'\n")
    return ["reward.function=my_mistake:score", "data.train_rows=64"]


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


Settings = Callable[[Path], list[str]]
MISTAKES: dict[str, tuple[str, Settings, list[str]]] = {
    "recipe": ("dmo", lambda _: [], ["demo"]),
    "setting": ("demo", lambda _: ["trainer.stepz=3"], ["trainer.steps"]),
    "value": ("demo", lambda _: ["trainer.steps=many"], ["trainer.steps"]),
    "combination": ("demo", lambda _: ["rollout.n=1"], ["rollout.n"]),
    "model": ("demo", lambda _: ["model.path=/no/such/model"], ["/no/such/model"]),
    "data": ("grpo", lambda place: [*files(place, [ROW] * 4), "data.path=/no/rows.parquet"], ["/no/rows.parquet"]),
    "overlap": ("grpo", lambda place: files(place, [ROW, HELD_OUT] * 2), ["held-out"]),
    "column": ("grpo", without_truth, ["reward_model"]),
    "data_source": ("grpo", lambda place: files(place, [{**ROW, "data_source": "mine"}] * 4), ["mine", "scorer"]),
    "scorer": ("demo", broken_scorer, ["returned 'right'", "row 1", "correct the scorer"]),
    "tracking": ("demo", lambda _: ["tracking.uri=http://127.0.0.1:9"], ["MLflow"]),
    "run": ("demo", lambda _: ["--resume"], ["a run to resume"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_twelve_typical_mistakes(place: Path, mistake: str) -> None:
    recipe, settings, words = MISTAKES[mistake]
    before = cpu_s()
    done = refused(rollforward(place / "home", "run", recipe, *settings(place), folder=place, timeout=120))
    assert cpu_s() - before < MOST_CPU_S
    assert all(word in done.output for word in words), done.output
    assert "resume from the last committed step" not in done.output
    assert not list((place / "home/runs").glob("*")) and not (place / "home/ray").exists()


def refused(done: Result) -> Result:
    """The result of a command that has refused its input."""
    assert done.code == 2, done.output
    assert "Traceback" not in done.output
    for part in ("expected:", "seen:", "where:", "fix:"):
        assert part in done.output
    return done


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["data.source=gsm9k"], "gsm8k"),
        (["algorithm.overlong_buffer=9"], "every response would be penalised as overlong"),
        (["reward.function=no_module_here:score"], "no_module_here"),
        (["reward.extra_functions=[absent=0.5]"], "absent"),
        (["agent.tools=[calculater]"], "did you mean calculator"),
        (["agent.environment=no_module_here:Game"], "ModuleNotFoundError"),
        (["agent.mcp_servers=[http://127.0.0.1:9/mcp]"], "127.0.0.1:9 did not list its tools"),
    ],
)
def test_parts_that_are_not_there(tmp_path: Path, settings: list[str], words: str) -> None:
    with pytest.raises(InputError) as refusal:
        first_checks(compose("demo", settings).config, tmp_path)
    assert words in str(refusal.value)


def test_engines_that_would_share_their_memory(tmp_path: Path) -> None:
    settings = ["rollout={tensor_parallel_size: 2, ranks_per_node: 4}", "model.tiny.heads=2"]
    with pytest.raises(InputError, match="engines of 2"):
        preflight(compose("demo", settings), tmp_path)


@pytest.mark.parametrize(("name", "words"), [("Qwen/Qwen3-rl", "must not be blank or contain /"), ("", "blank")])
def test_names_of_models_that_mlflow_refuses(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        compose("demo", [f"registry.model_name={json.dumps(name)}"])


def test_a_run_name_that_leads_elsewhere(place: Path) -> None:
    assert "run name" in refused(rollforward(place / "home", "run", "demo", "--run", "../x")).output


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
    assert "ROLLFORWARD_HOME" in refused(rollforward(tmp_path / "file/home", "run", "demo")).output


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
        assert str(port) in refused(rollforward(home, "ui", "--port", str(port))).output


def test_a_port_that_is_none() -> None:
    with pytest.raises(InputError, match="--mlflow-port 70000"):
        check_port(70000, "--mlflow-port")


@pytest.mark.parametrize(
    ("rows", "words"),
    [([], "row"), ([*[ROW] * 4, {**ROW, "prompt": [{"role": "user", "content": "1 " * 40}]}], "row 5")],
    ids=["empty", "long"],
)
def test_rows_that_cannot_be_used(tmp_path: Path, rows: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_rows(compose("grpo", files(tmp_path, rows)).config, [])


def test_of_many_rows_only_some_are_read_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.first_checks.MOST_ROWS", 2)
    check_rows(compose("grpo", files(tmp_path, [ROW, ROW, ROW, HELD_OUT])).config, [])
    bad = {**ROW, "data_source": "unknown"}
    with pytest.raises(InputError) as raised:
        check_rows(compose("grpo", files(tmp_path, [bad] * 9)).config, [])
    assert "train row 1" in raised.value.where and "of this kind" not in raised.value.seen


def test_rows_of_more_sources_than_a_report_names_are_accepted(tmp_path: Path) -> None:
    rows = [
        {**ROW, "data_source": f"s{i}", "prompt": [{"role": "user", "content": str(i)}]} for i in range(MAX_NAMES + 2)
    ]
    sources = ",".join(f"s{i}=exact" for i in range(len(rows)))
    held_out = [{**HELD_OUT, "data_source": "s0"}]
    check_rows(compose("grpo", [*files(tmp_path, rows, held_out), f"reward.sources=[{sources}]"]).config, [])


def test_an_outage_of_the_datas_storage_is_left_to_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def outage(config: object, seed: int) -> None:
        raise TransientError("503 Slow Down")

    monkeypatch.setattr(source_files, "rows", outage)
    check_rows(compose("grpo", files(tmp_path, [ROW])).config, [])


def test_config_prints_and_starts_nothing(tmp_path: Path) -> None:
    before = cpu_s()
    done = rollforward(tmp_path / "none", "config", "demo", "trainer.steps=7")
    assert done.code == 0 and cpu_s() - before < 2
    assert "override" in done.output and "recipe demo" in done.output
    assert not (tmp_path / "none").exists()
