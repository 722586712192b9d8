"""Short real runs whose responses a reward model scores."""

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import ray
import torch
from support import save_reward_model
from support_training import SMALL, trainer_of

from rl_core.cluster.resources import ray_session
from rl_core.cluster.reward_model import RewardModelScores
from rl_core.config.compose import compose
from rl_core.data.dataset import RLHFDataset
from rl_core.data.protocol import DataProto
from rl_core.errors import InputError
from rl_core.evaluation.evaluate import evaluate
from rl_core.rewards.model import RewardModel
from rl_core.rewards.worker import RewardResult, failure
from rl_core.storage.store import Store

HOME = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parents[1]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    save_reward_model(folder)
    return folder


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    with ray_session(HOME, 3, False):
        yield


@pytest.mark.parametrize(
    ("settings", "weight", "places"),
    [
        (["reward.function=none"], 1.0, 1),
        (["reward.model.ranks_per_node=2", "reward.model.weight=0.5"], 0.5, 2),
    ],
    ids=["alone and colocated", "beside a scorer on its own pool"],
)
def test_a_run_is_scored_by_the_reward_model(
    ray_here: None, judge: Path, tmp_path: Path, settings: list[str], weight: float, places: int
) -> None:
    config = compose("grpo", [*SMALL, f"reward.model.path={judge}", "trainer.steps=2", *settings]).config
    store = Store(str(tmp_path / "run"))
    with trainer_of(store, config, tmp_path / "model") as trainer:
        roles, tokenizer = trainer.roles, trainer.sampler.tokenizer
        assert len(placements(store.url)) == places
        trainer.fit(2)
        rows = RLHFDataset.load(store, "val", tokenizer)
        result = evaluate(config, rows, roles, tokenizer)
    assert not placements(store.url)
    model = RewardModel(str(judge), torch.float32, 1000)
    train = RLHFDataset.load(store, "train", tokenizer)

    def wanted(messages: list[dict[str, str]], text: str) -> tuple[float, float]:
        """The reward model's score of a text, and the whole score."""
        judged = model.score([model.encode(messages, text)]).item()
        return judged, weight * judged + (0.0 if config.reward.function == "none" else len("".join(text.split())) / 10)

    table = pq.read_table(io.BytesIO(store.read_bytes("rollouts/step_000002.parquet"))).to_pylist()
    metrics = store.read_json("ledger/step_000002.json")["metrics"]
    for row in table:
        prompt = next(
            item["prompt"]
            for item in (train[i] for i in range(len(train)))
            if item["extra_info"]["index"] == row["row"]
        )
        judged, score = wanted(prompt, str(tokenizer.decode(row["responses"], skip_special_tokens=True)))
        assert row["reward_named/model"] == pytest.approx(judged, abs=1e-5)
        assert sum(row["token_level_scores"]) == pytest.approx(score, abs=1e-5)
    mean = sum(row["reward_named/model"] for row in table) / len(table)
    assert metrics["reward_named/model/mean"] == pytest.approx(mean, abs=1e-6)
    assert metrics["score/max"] > metrics["score/min"], "the model gives all responses one score"
    for sample, row in zip(result["samples"], rows.rows, strict=True):
        assert sample["score"] == pytest.approx(wanted(row["prompt"], sample["answer"])[1], abs=1e-5)


def placements(url: str) -> list[dict[str, Any]]:
    tables = ray.util.placement_group_table().values()
    return [
        table for table in tables if table["name"].startswith(f"rollforward {url} (") and table["state"] == "CREATED"
    ]


class Fixed:
    """Stands for the group of a reward model."""

    def __init__(self, scores: list[float]) -> None:
        self.scores, self.read = scores, list[str]()

    def compute_rm_score(self, data: DataProto) -> DataProto:
        self.read += data.non_tensor_batch["response"].tolist()
        return DataProto({"rm_score": torch.tensor(self.scores)})


def test_a_response_that_one_of_them_cannot_score_has_no_score() -> None:
    given = [RewardResult(0.5, "ok", named={"short": 1.0}), failure("timeout", "slow"), RewardResult(0.5, "ok")]
    model = Fixed([2.0, float("nan")])
    both = RewardModelScores(model, 0.25)  # type: ignore[arg-type]
    good, slow, long = both.added(given, [{"prompt": []}] * 3, ["a", "b", "c"])
    assert (good.score, good.named) == (1.0, {"short": 1.0, "model": 2.0})
    assert (slow.score, slow.status) == (None, "timeout") and model.read == ["a", "c"]
    assert (long.score, long.status) == (None, "non_finite") and "exceeds its context length" in long.detail
    assert both.added([slow], [{"prompt": []}], ["b"]) == [slow]


def test_combinations_that_score_nothing_or_have_no_place_are_refused(judge: Path) -> None:
    for settings, words in (
        (["reward.function=none"], "requires another source of rewards: reward.model.path"),
        ([f"reward.model.path={judge}", "reward.model.nodes=2"], "reward.model.ranks_per_node"),
    ):
        with pytest.raises(InputError, match=words):
            compose("grpo", settings)
    assert compose("grpo", [f"reward.model.path={judge}", "reward.model.ranks_per_node=3"]).config.slots == 4
    for others in ("agent.tools=[calculator]", "agent.environment=a:B", "reward.extra_functions=[exact=1]"):
        assert compose("grpo", ["reward.function=none", others]).config.reward.function == "none"
