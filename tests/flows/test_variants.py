"""The same path with two ranks, with a critic, with files of one's own, and with rewards that mean nothing."""

import json
from pathlib import Path

import pytest
from support_flows import SMALL, rollforward
from support_pages import write_files
from support_servers import Server, empty_bucket, s3_server

from rl_core.storage.store import Store

PROBLEMS = [
    {"question": f"Ann has {a} apples and buys {b} more. How many?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"}
    for a in range(2, 12)
    for b in range(3, 7)
]
TWO_STEPS = [
    "data.train_batch_size=4",
    "actor.mini_batch_size=4",
    "rollout.n=2",
    "trainer.steps=2",
    "evaluation.sampled_n=1",
    "gate.min_score=0",
]


def last_record(home: Path, run: str, step: int = 2) -> dict[str, float]:
    record = json.loads((home / f"runs/{run}/ledger/step_{step:06d}.json").read_text())
    return dict(record["metrics"])


def test_two_ranks_of_ppo_train_a_critic_on_a_scorer_of_ones_own(home: Path) -> None:
    settings = [
        "data.max_prompt_length=16",
        "data.max_response_length=8",
        "data.val_rows=16",
        "reward.function=support_rewards:length",
        "trainer.ranks_per_node=2",
    ]
    done = rollforward(home, "run", "ppo", "--run", "ppo", *TWO_STEPS, *settings)
    assert done.code == 0, done.output
    metrics = last_record(home, "ppo")
    assert metrics["critic/vf_loss"] > 0 and metrics["critic/grad_norm"] > 0
    assert "kl/ref" in metrics
    assert metrics["kl/canary"] < 1e-4 and metrics["kl/rollout_max_difference"] < 1e-4
    assert (home / "runs/ppo/checkpoints/step_000002/lease_000001/critic").is_dir()


def test_an_algorithm_and_a_scorer_of_ones_own_are_found_in_the_working_directory(home: Path, tmp_path: Path) -> None:
    write_files("algorithms", tmp_path)
    (tmp_path / "my_rewards.py").write_text("def length(response, row):\n    return len(response) / 8\n")
    tiny = ["data.max_prompt_length=16", "data.max_response_length=8", "data.val_rows=16"]
    settings = [*TWO_STEPS, *tiny, "reward.function=my_rewards:length", "algorithm.gamma=0.5"]
    done = rollforward(home, "run", "mine.yaml", "--run", "own", *settings, folder=tmp_path)
    assert done.code == 0, done.output
    metrics = last_record(home, "own")
    assert {metrics["advantage/max"], metrics["advantage/min"]} <= {0.5, 0.0, -0.5}
    assert 0 < metrics["actor/positive"] < 1
    again = rollforward(home, "replay", "own", "2", folder=tmp_path)
    assert again.code == 0 and "no\n" not in again.output, again.output


def test_gsm8k_files_of_ones_own_stop_a_resumed_run_when_they_change_unless_it_keeps_its_data(
    home: Path, tmp_path: Path
) -> None:
    def write(split: str, rows: list[dict[str, str]]) -> None:
        (tmp_path / f"{split}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))

    write("train", PROBLEMS[:24])
    write("test", PROBLEMS[24:])
    settings = [f"data.path={tmp_path}", "model.path=tiny", "model.dtype=float32", "data.max_response_length=16"]
    command = ["run", "gsm8k", "--run", "gsm8k", *TWO_STEPS, *settings]
    done = rollforward(home, *command)
    assert done.code == 0, done.output
    assert "24 training rows, 16 held out" in done.output
    assert "champion" in done.output
    write("train", PROBLEMS[:20])
    refused = rollforward(home, *command)
    assert refused.code == 2 and "train.jsonl: " in refused.output and "--keep-data" in refused.output
    kept = rollforward(home, *command, "--keep-data")
    assert kept.code == 0, kept.output
    alone = rollforward(home, "run", "gsm8k", "--keep-data")
    assert alone.code == 2 and "--run NAME" in alone.output


def test_an_object_store_and_an_mlflow_server(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = Server(f"sqlite:///{tmp_path}/mlflow.db", tmp_path)
    mlflow.start()
    try:
        with s3_server() as endpoint:
            empty_bucket(endpoint, monkeypatch)
            places = ["storage.root=s3://runs/team", f"tracking.uri={mlflow.uri}", "trainer.keep_checkpoints=1"]
            run = ["run", "demo", "--run", "remote", *SMALL, *TWO_STEPS, *places]
            done = rollforward(home, *run)
            assert done.code == 0, done.output
            kept = Store("s3://runs/team/remote")
            assert kept.committed_steps("checkpoints") == [2] and kept.verify("checkpoints/step_000002") == []
            # The same command finds everything there: nothing is trained again, the version stays the only one.
            again = rollforward(home, *run)
            assert again.code == 0 and "reward" not in again.output, again.output
            listed = rollforward(home, "models", "--tracking-uri", mlflow.uri).output
            assert "version 1" in listed and "version 2" not in listed
    finally:
        mlflow.kill()


@pytest.fixture(scope="module")
def control(home: Path) -> tuple[float, float]:
    """Sampled score before and after the demo with each reward handed to another prompt."""
    settings = ["reward.shuffle_control=true", "trainer.steps=20", "gate.reload=false"]
    done = rollforward(home, "run", "demo", "--run", "control", *settings)
    assert done.code == 0, done.output
    files = sorted((home / "runs/control/evaluation").glob("step_*.json"))
    scores = [json.loads(file.read_text())["sampled"] for file in files]
    return scores[0], scores[1]


def test_rewards_of_other_prompts_teach_nothing(control: tuple[float, float]) -> None:
    before, after = control
    assert after < before + 0.05
