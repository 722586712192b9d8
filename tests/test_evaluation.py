"""Held-out scores of conversations, with the rollouts given."""

from types import SimpleNamespace
from typing import Any

import pytest
from support_scoring import with_results

from rl_core.config.compose import compose
from rl_core.data.protocol import DataProto
from rl_core.errors import TransientError
from rl_core.evaluation import evaluate
from rl_core.models.tiny import build_tokenizer
from rl_core.rewards.worker import RewardResult, failure
from rl_core.rollout.trajectory import Trajectory, to_batch

TOKENIZER = build_tokenizer()
ROWS = [
    {"prompt_ids": [4, 7], "prompt": [{"role": "user", "content": "0"}], "reward_model": {"ground_truth": ""}}
    for _ in range(10)
]


def score_of(failed: int, *settings: str) -> float:
    """The greedy score of ten conversations of which some have failed; a scorer gave each 1, an environment 0.5."""
    lost = failure("error", "the rollout failed: environment_error: it is broken")

    def roll_out(prompts: DataProto, temperature: float) -> DataProto:
        talks = [Trajectory([4, 7], 0, response_ids=[8, 2], response_mask=[1, 1], reward=0.5) for _ in range(10)]
        for talk in talks:
            talk.log_probs, talk.versions = [0.0, 0.0], [0, 0]
        for talk in talks[:failed]:
            talk.fail("environment_error", "it is broken")
        results = [RewardResult(1.0, "ok") if talk.state.value != "failed" else lost for talk in talks]
        return with_results(prompts.union(to_batch(talks, 2)), results)

    config = compose("grpo", ["evaluation.sampled_n=1", *settings]).config
    roles: Any = SimpleNamespace(rollout=SimpleNamespace(generate_sequences=roll_out), model_scores=None)
    rows: Any = ROWS
    result = evaluate(config, rows, roles, TOKENIZER)
    assert result["greedy"] == result["sampled"]
    return float(result["greedy"])


def test_what_an_environment_gives_is_part_of_a_held_out_score() -> None:
    assert score_of(0) == pytest.approx(1.5)
    assert score_of(0, "reward.turn_weight=2") == pytest.approx(2.0)


def test_a_held_out_conversation_that_has_failed_scores_nothing() -> None:
    assert score_of(1) == pytest.approx(1.35)
    with pytest.raises(TransientError, match="2 of 10 held-out conversations .*it is broken"):
        score_of(2)
