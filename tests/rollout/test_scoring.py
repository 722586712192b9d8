"""Trajectories are scored as they end: while others go on, beside their deadline, and with all that was said."""

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support_conversations import talk

from rl_core.config.schema import AgentConfig, RewardConfig
from rl_core.data.protocol import DataProto
from rl_core.errors import TransientError
from rl_core.models.tiny import build_tokenizer
from rl_core.rewards.runner import RewardRunner
from rl_core.rewards.worker import RewardResult, failure
from rl_core.rollout.agent.agent_loop import roll_out
from rl_core.rollout.engine.protocol import Completion, Sampling
from rl_core.rollout.scoring import TrajectoryScorer, results_of, score_columns

TOKENIZER = build_tokenizer()
ROW = {"data_source": "exact", "reward_model": {"ground_truth": "7"}}


class Slow:
    """An engine that answers `7`, the prompt of n tokens after n tenths of a second, and notes when."""

    def __init__(self) -> None:
        self.answered: list[float] = []

    async def generate(self, token_ids: list[int], seed: int, sampling: Sampling) -> Completion:
        await asyncio.sleep(0.1 * len(token_ids))
        self.answered.append(time.monotonic())
        ids = [*TOKENIZER.encode("7"), TOKENIZER.eos_token_id]
        return Completion(token_ids, ids, [-0.5] * len(ids), [0] * len(ids), "stop")

    def finish_batch(self) -> None:
        pass


def rolled_out(lengths: list[int], scoring: Any, **columns: list[Any]) -> tuple[DataProto, Slow]:
    given: dict[str, Any] = {
        "prompt_ids": [[4] * length for length in lengths],
        "seed": list(range(len(lengths))),
        **columns,
    }
    engine = Slow()
    agent = AgentConfig(timeout_s=1.5)

    async def work() -> DataProto:
        prompts, sampling = DataProto.from_dict({}, given), Sampling(1.0, 8, (TOKENIZER.eos_token_id,))
        return await roll_out(engine, prompts, sampling, agent, None, scoring)  # type: ignore[arg-type]

    return asyncio.run(work()), engine


def test_a_trajectory_is_scored_while_others_are_sampled() -> None:
    async def work() -> tuple[list[float], Slow]:
        scored: list[float] = []
        async with RewardRunner(RewardConfig()) as runner:
            scorer = TrajectoryScorer(runner, TOKENIZER)
            await runner.score("7", ROW)  # the process is up

            async def score(trajectory: Any) -> RewardResult:
                result = await scorer.score(trajectory)
                scored.append(time.monotonic())
                return result

            engine = Slow()
            given: dict[str, Any] = {"prompt_ids": [[4], [4] * 10], "seed": [1, 2], "row": [ROW, ROW]}
            prompts, sampling = DataProto.from_dict({}, given), Sampling(1.0, 8, (TOKENIZER.eos_token_id,))
            scoring = SimpleNamespace(score=score)
            batch = await roll_out(engine, prompts, sampling, AgentConfig(), None, scoring)  # type: ignore[arg-type]
        assert batch.batch["score"].tolist() == [1.0, 1.0]
        return scored, engine

    scored, engine = asyncio.run(work())
    assert scored[0] - engine.answered[0] < 0.5 and scored[0] < engine.answered[1] < scored[1]


def test_scoring_is_no_part_of_a_trajectorys_time_and_the_wait_for_it_is_known() -> None:
    async def score(trajectory: Any) -> RewardResult:
        await asyncio.sleep(2.0)
        return RewardResult(1.0, "ok", seconds=2.0)

    batch, _ = rolled_out([1, 5], SimpleNamespace(score=score), row=[ROW, ROW])
    assert batch.non_tensor_batch["status"].tolist() == ["completed"] * 2
    assert batch.batch["score_seconds"].tolist() == [2.0, 2.0]
    assert batch.batch["score_wait"].tolist() == pytest.approx([2.0, 2.0], abs=0.3)


def test_prompts_without_rows_have_no_scores() -> None:
    batch, _ = rolled_out([1], SimpleNamespace(score=None))
    assert "score" not in batch.columns and "named" not in batch.columns


def test_an_error_of_scoring_is_raised_as_what_it_is() -> None:
    async def score(trajectory: Any) -> RewardResult:
        raise TransientError("the scorers are gone")

    with pytest.raises(TransientError, match="the scorers are gone"):
        rolled_out([1, 2], SimpleNamespace(score=score), row=[ROW, ROW])


def test_a_scorer_of_three_arguments_reads_the_whole_conversation(tiny_model: Path, tmp_path: Path) -> None:
    turns, row = ['[calculator(x="12*34")]', "408"], {**ROW, "folder": str(tmp_path)}
    reward = {"function": "scorers_for_tests:told"}
    data, _ = talk(tiny_model, turns, ["7"], agent={"tools": ["calculator"]}, row=row, reward=reward)
    assert data.batch["score"].tolist() == [3.0, 1.0], data.non_tensor_batch["score_detail"]
    seen, short = (json.loads((tmp_path / name).read_text()) for name in ("408", "7"))
    assert seen["messages"] == [
        {"role": "assistant", "content": turns[0]},
        {"role": "tool", "content": "408"},
        {"role": "assistant", "content": "408"},
    ]
    assert [(call["name"], call["status"]) for call in seen["calls"]] == [("calculator", "ok")]
    assert (seen["turns"], seen["stop_reason"], seen["reward"]) == (2, "stop", 0.0)
    assert seen["response_tokens"] == data.batch["response_length"][0]
    assert short["messages"] == [{"role": "assistant", "content": "7"}] and short["calls"] == []


def test_a_trajectory_that_failed_is_not_shown_to_the_scorer(tiny_model: Path) -> None:
    agent = {"environment": "tools_for_tests:Countdown"}
    data, _ = talk(tiny_model, ["a", "b"], ["exit"], agent=agent, row={"turns": 2, **ROW}, reward={})
    assert data.non_tensor_batch["score_status"].tolist() == ["ok", "error"]
    assert data.non_tensor_batch["score_detail"][1].startswith("the rollout failed: environment_error: ")
    assert data.batch["score"].isnan().tolist() == [False, True] and data.batch["score_seconds"][1] == 0


def test_results_become_columns_and_results_again() -> None:
    results = [RewardResult(0.5, "ok", "", {"short": 0.25}, 1.5), failure("non_finite", "nan")]
    columns = score_columns(results, 2.0)
    assert results_of(DataProto.from_bytes(columns.to_bytes())) == results
    assert columns.batch["score_wait"].tolist() == [2.0, 2.0]
