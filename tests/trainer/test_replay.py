"""A committed step is computed again from its rollouts, by the command and by the library."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support_training import Trained

from flows.cli.main import main
from rl_core.config.schema import RunConfig
from rl_core.data.protocol import DataProto
from rl_core.storage import run_files
from rl_core.storage.ledger import Ledger
from rl_core.storage.run_files import step_name
from rl_core.storage.store import Store
from rl_core.trainer.batch import training_rows
from rl_core.trainer.replay import TOLERANCE, check_recorded, compare, correlation, load_batch, replay
from rl_core.trainer.rollout_file import rollout_parquet

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def home(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with copies of the runs, so that a test may damage them."""
    shutil.copytree(trained.home / "runs", tmp_path / "runs")
    monkeypatch.setenv("ROLLFORWARD_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.fixture
def command(home: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*words: str) -> tuple[int, str]:
        code = main(["replay", *words])
        return code, capsys.readouterr().out

    return run


def rollouts(home: Path, run: str, step: int) -> Path:
    return home / "runs" / run / "rollouts" / f"{step_name(step)}.parquet"


def change(file: Path, column: str) -> None:
    """Adds 0.5 to the last value of a column, in the first row whose last token trains."""
    table = pq.read_table(file)
    values = table[column].to_pylist()
    place = next(i for i, mask in enumerate(table["response_mask"].to_pylist()) if mask[-1])
    values[place][-1] += 0.5
    at = table.column_names.index(column)
    pq.write_table(table.set_column(at, column, pa.array(values)), file)


def files(home: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in home.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("run", "step", "quantities"),
    [
        ("grpo", 1, 5),
        ("grpo", 2, 5),
        ("grpo", 3, 5),
        ("ppo", 1, 6),
        ("ppo", 2, 6),  # all that there is, on two ranks, with a weight of the KL that the controller has moved
    ],
)
def test_a_step_replayed_equals_what_was_trained(command: Command, run: str, step: int, quantities: int) -> None:
    code, output = command(run, str(step))
    lines = [line for line in output.splitlines() if line.endswith(("yes", "no"))]
    assert code == 0, output
    assert len(lines) == quantities and all(line.endswith("yes") for line in lines), output
    assert "loss of the first mini-batch" in lines[-1]


@pytest.mark.parametrize(
    ("run", "column", "wrong"),
    [
        ("grpo", "token_level_scores", ["rewards", "advantages", "returns"]),
        ("grpo", "advantages", ["advantages"]),
        ("grpo", "entropy", ["loss of the first mini-batch"]),
        ("ppo", "ref_log_prob", ["rewards", "advantages"]),
        ("ppo", "values", ["advantages"]),
        ("ppo", "rollout_log_probs", ["trained tokens"]),
    ],
)
def test_a_changed_value_is_seen(home: Path, command: Command, run: str, column: str, wrong: list[str]) -> None:
    change(rollouts(home, run, 2), column)
    code, output = command(run, "2")
    assert code == 1, output
    seen = [line.split("  ")[1].strip() for line in output.splitlines() if line.endswith(" no")]
    assert seen[: len(wrong)] == wrong  # with equal lengths in a group, a reward moves no loss
    assert command(run, "1")[0] == 0


def test_a_changed_record_is_seen(home: Path, command: Command) -> None:
    file = home / "runs/ppo/ledger/step_000002.json"
    record = json.loads(file.read_text())
    for metric, off in (("actor/first_loss", 1e-4), ("kl/coef", 0.05)):
        changed = {**record["metrics"], metric: record["metrics"][metric] + off}
        file.write_text(json.dumps({**record, "metrics": changed}))
        assert command("ppo", "2")[0] == 2, "the checksum is wrong"
        file.write_text(json.dumps({"step": 2, "metrics": changed}))  # as a person may restore it
        assert command("ppo", "2")[0] == 1
    file.write_text(json.dumps(record))
    assert command("ppo", "2")[0] == 0


def test_another_setting_differs_and_writes_nothing(home: Path, command: Command) -> None:
    before = files(home)
    code, output = command("grpo", "1", "--set", "algorithm.estimator=rloo")
    assert code == 0 and files(home) == before
    cells = {line[:32].strip(): line[32:].split() for line in output.splitlines()[2:]}
    ours, theirs = cells["advantages, standard deviation"]
    assert float(theirs) < float(ours)  # rloo does not divide by the group's standard deviation, which is below 1
    assert 0 < float(cells["correlation of advantages"][0]) < 1
    ours, theirs = cells["loss of the first mini-batch"]
    assert ours != theirs


def test_a_setting_that_changes_nothing_gives_what_was_trained(command: Command) -> None:
    for run, same in (("grpo", "actor.clip_ratio=0.3"), ("ppo", "algorithm.kl_controller=fixed")):
        code, output = command(run, "2", "--set", same)
        rows = [line[32:].split() for line in output.splitlines()[3:-1]]
        assert code == 0 and len(rows) == 6
        assert all(float(ours) == pytest.approx(float(theirs), abs=1e-5) for ours, theirs in rows), output
        assert output.split()[-1] == "1"


def test_settings_act_on_what_was_sampled(trained: Trained) -> None:
    """Without correction, filtering and shaping a step is what a run without them would have had."""
    config = trained.configs["ppo"]
    trained_batch = batch_of(trained, "ppo", 1)
    trained_batch.batch["response_mask"][0] = 0  # as if its tokens had been rejected
    off = {
        "algorithm": {"estimator": "grpo"},
        "correction": {},
        "actor": {"mini_batch_size": 2},
    }
    plain = RunConfig.model_validate(config.model_dump() | off)
    batch, _ = replay(trained_batch, plain, 0.0, 1)
    assert "weights" not in batch.batch and "weights" in trained_batch.batch
    sampled, kept = batch.batch["response_mask"].sum(), trained_batch.batch["response_mask"].sum()
    assert sampled == batch.batch["response_length"].sum() and 0 < kept < sampled
    assert batch.batch["token_level_rewards"].sum() == pytest.approx(batch.batch["token_level_scores"].sum().item())
    assert batch.batch["token_level_rewards"].sum() > trained_batch.batch["token_level_rewards"].sum()
    assert correlation(trained_batch, batch) < 0.999


def batch_of(trained: Trained, run: str, step: int) -> DataProto:
    return load_batch(rollouts(trained.home, run, step).read_bytes(), trained.configs[run], "here")


def test_a_batch_comes_back_as_it_was_written(trained: Trained) -> None:
    for run in trained.configs:
        batch = batch_of(trained, run, 1)
        arrays = {**batch.non_tensor_batch, "seed": batch.batch.pop("seed").numpy()}
        found = zip(batch.batch.pop("row").tolist(), arrays["data_source"], strict=True)
        row = [{"extra_info": {"index": index}, "data_source": source} for index, source in found]
        again = rollout_parquet(type(batch).from_dict(batch.batch, {**arrays, "row": row}))
        written = pq.read_table(rollouts(trained.home, run, 1))
        assert pq.read_table(io.BytesIO(again)).select(written.column_names).equals(written)


def test_mini_batches_are_the_same_prompts_for_any_number_of_ranks(trained: Trained) -> None:
    """Two ranks train each mini-batch on the prompts that one rank would; their rows are dealt out once."""
    batch, config = batch_of(trained, "ppo", 1), trained.configs["ppo"]
    prompts = list(dict.fromkeys(batch.non_tensor_batch["uid"].tolist()))
    assert batch.non_tensor_batch["uid"].tolist() == [uid for uid in prompts for _ in range(config.rollout.n)]
    plain = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"pf_ppo": "none"})})
    shares = [share.chunk(2) for share in training_rows(batch, plain, 1).chunk(2)]
    for k in range(2):
        mini = {uid for share in shares for uid in share[k].non_tensor_batch["uid"]}
        assert mini == set(prompts[2 * k : 2 * k + 2])


def test_what_is_not_finite_is_not_equal(trained: Trained) -> None:
    batch, config = batch_of(trained, "grpo", 1), trained.configs["grpo"]
    first = trained.records("grpo")[0]["metrics"]["actor/first_loss"]
    replayed, loss = replay(batch, config, 0.0, 1)
    assert all(line.equal for line in compare(batch, first, replayed, loss, "float32"))
    replayed.batch["advantages"][0, 0] += 2 * TOLERANCE
    replayed.batch["returns"][0, 0] = float("nan")
    lines = {line.quantity: line.equal for line in compare(batch, first, replayed, float("nan"), "float32")}
    assert not any(lines[name] for name in ("advantages", "returns", "loss of the first mini-batch"))
    assert lines["rewards"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["gpro", "1"], ["'gpro'", "grpo, lora, ppo"]),
        (["no/such/run", "1"], ["no/such/run"]),
        (["grpo", "4"], ["1 to 3", "step 4"]),
        (["grpo", "0"], ["1 to 3", "step 0"]),
        (["grpo", "1", "--set", "algorithm.estimator=gae"], ["values of the critic", "algorithm.estimator=gae"]),
        (["grpo", "1", "--set", "algorithm.estimator=remax"], ["rewards of greedy responses"]),
        (["grpo", "1", "--set", "algorithm.estimator=gdpo"], ["named rewards"]),
        (["grpo", "1", "--set", "actor.kl_loss_coef=0.1"], ["log-probs of a reference model", "kl_loss_coef"]),
        (["grpo", "1", "--set", "algorithm.estimator=grppo"], ["grpo"]),
        (["grpo", "1", "--set", "algorithm.estimater=rloo"], ["algorithm.estimator"]),
        (["grpo", "1", "--set", "rloo"], ["KEY=VALUE"]),
        (["grpo", "1", "--set", "rollout.temperature=0.5"], ["rollout.temperature"]),
        (["grpo", "1", "--set", "algorithm.max_generated_batches=3"], ["algorithm.max_generated_batches"]),
    ],
)
def test_what_cannot_be_replayed_is_said(command: Command, words: list[str], parts: list[str]) -> None:
    code, output = command(*words)
    assert code == 2, output
    for part in (*parts, "expected:", "seen:", "where:", "fix:"):
        assert part in output, output


def test_rollouts_that_cannot_be_read(home: Path, command: Command) -> None:
    file = rollouts(home, "grpo", 1)
    table = pq.read_table(file)
    pq.write_table(table.drop_columns(["scored", "entropy"]), file)
    code, output = command("grpo", "1")
    assert code == 2 and "no scored, entropy" in output
    file.write_bytes(b"no parquet")
    code, output = command("grpo", "1")
    assert code == 2 and "damaged" in output
    file.unlink()
    code, output = command("grpo", "1")
    assert code == 2 and "no file" in output
    shutil.rmtree(home / "runs/grpo/checkpoints")
    code, output = command("grpo", "1")
    assert code == 2 and "--run grpo" in output


def test_a_failed_step_is_replayed_as_far_as_it_came(home: Path, command: Command) -> None:
    store = Store(str(home / "runs/grpo"))
    metrics = Ledger(store).read(3)["metrics"]
    store.write_bytes(run_files.failed_rollouts(4), rollouts(home, "grpo", 3).read_bytes())
    store.write_json(run_files.failed_error(4), {"step": 4, "error": "a rank was lost", "metrics": metrics})
    code, output = command("grpo", "4")
    assert code == 0 and "step 4 failed: a rank was lost" in output and output.count("yes\n") == 5, output
    del metrics["actor/first_loss"]  # it failed in the update
    store.write_json(run_files.failed_error(4), {"step": 4, "error": "a rank was lost", "metrics": metrics})
    code, output = command("grpo", "4")
    assert code == 0 and output.count("yes\n") == 4 and "nan" in output.splitlines()[-1], output
    assert command("grpo", "4", "--set", "algorithm.estimator=rloo")[0] == 0
    change(home / "runs/grpo/failed" / f"{step_name(4)}.parquet", "advantages")
    assert command("grpo", "4")[0] == 1
    assert "failed" not in command("grpo", "3")[1]


def test_a_run_is_also_found_by_its_folder(home: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFORWARD_HOME", str(home / "elsewhere"))
    assert command(str(home / "runs" / "grpo"), "1")[0] == 0
    code, output = command("grpo", "1")
    assert code == 2 and "none found" in output and not (home / "elsewhere").exists()


def test_what_the_step_recorded_is_enough_for_its_own_config(trained: Trained) -> None:
    for run, config in trained.configs.items():
        check_recorded(batch_of(trained, run, 1), config, "here")
