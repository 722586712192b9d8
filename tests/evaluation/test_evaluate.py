"""Held-out scores of conversations, with the rollouts given."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support_scoring import with_results

from rl_core.config.compose import compose
from rl_core.data.protocol import DataProto
from rl_core.errors import TransientError
from rl_core.evaluation.evaluate import cached, evaluate, final_answer, rows_hash, settings_of
from rl_core.models.tiny import build_tokenizer
from rl_core.rewards.worker import RewardResult, failure
from rl_core.rollout.trajectory import Trajectory, TrajectoryState, to_batch
from rl_core.storage.manifest import Json
from rl_core.storage.store import Store

TOKENIZER = build_tokenizer()
ROWS = [
    {
        "prompt_ids": [4, 7],
        "data_source": "even" if i % 2 == 0 else "odd",
        "prompt": [{"role": "user", "content": "0"}],
        "reward_model": {"ground_truth": ""},
    }
    for i in range(10)
]


def rolled_out(words: list[str], scores: list[float], *settings: str, prompt: Sequence[int] = (4, 7)) -> Json:
    """The evaluation of ten rows; every response to row i is the i-th word, and the last one hits the limit."""
    n = compose("grpo", list(settings)).config.evaluation.sampled_n

    def roll_out(prompts: DataProto, temperature: float) -> DataProto:
        each = 1 if temperature == 0 else n
        talks = []
        for word in [word for word in words for _ in range(each)]:
            ids = TOKENIZER.encode(word, add_special_tokens=False)
            mask = [1] * len(ids)
            talks.append(Trajectory(list(prompt), 0, response_ids=ids, response_mask=mask, stop_reason="stop"))
            talks[-1].log_probs, talks[-1].versions = [0.0] * len(ids), [0] * len(ids)
            talks[-1].state = TrajectoryState.COMPLETED
        talks[-1].stop_reason = "length"
        results = [RewardResult(score, "ok") for score in scores for _ in range(each)]
        return with_results(prompts.union(to_batch(talks, 8)), results)

    config = compose("grpo", list(settings)).config
    roles: Any = SimpleNamespace(rollout=SimpleNamespace(generate_sequences=roll_out), model_scores=None)
    rows: Any = ROWS
    return evaluate(config, rows, roles, TOKENIZER)


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


def test_an_evaluation_has_scores_intervals_sources_guards_and_rows() -> None:
    settings = ["evaluation.refusal_pattern='9'", "evaluation.sampled_n=2"]
    result = rolled_out(["1 2"] * 9 + ["9 9"], [1.0, 0.0] * 5, *settings)
    assert [result[name] for name in ("greedy", "sampled", "pass_at_k", "maj_at_k", "rows")] == [0.5, 0.5, 0.5, 0.5, 10]
    low, high = result["intervals"]["greedy"]
    assert 0.1 <= low < 0.5 < high <= 0.9
    assert result["sources"]["even"] == {"greedy": 1.0, "sampled": 1.0, "pass_at_k": 1.0, "maj_at_k": 1.0, "rows": 5}
    assert result["sources"]["odd"]["greedy"] == 0.0
    guards = result["guards"]
    assert guards["format"] == pytest.approx(0.9) and guards["refusal"] == pytest.approx(0.1) and guards["failed"] == 0
    tokens = len(TOKENIZER.encode("1 2", add_special_tokens=False))
    assert guards["length"] == tokens and len(result["first_turns"]) == 8
    assert result["first_turns"][0]["prompt_ids"] == [4, 7] and len(result["first_turns"][0]["response_ids"]) == tokens
    assert result["per_row"][1]["sampled"] == [0.0, 0.0] and result["per_row"][9]["refused"]


def test_first_turns_stand_behind_the_prompt_that_was_used() -> None:
    """An environment may have added to the row's."""
    first = rolled_out([str(i) for i in range(10)], [1.0] * 10, prompt=[4, 7, 9])["first_turns"]
    assert {tuple(turn["prompt_ids"]) for turn in first} == {(4, 7, 9)} and len(first) <= 10
    assert all(turn["response_ids"] for turn in first)


def test_responses_that_end_alike_are_one_answer() -> None:
    assert final_answer("so it is \\boxed{12} .") == "12"
    assert final_answer("two plus two\n#### 4\n") == "#### 4"
    assert final_answer(" \n") == ""


def test_the_same_weights_are_scored_once_on_the_same_rows(tmp_path: Path) -> None:
    config, made = compose("demo", []).config, []

    def make() -> Json:
        made.append(1)
        return {"greedy": len(made)}

    root, data = Store(str(tmp_path)), rows_hash(ROWS)
    first = cached(root, "a" * 64, data, settings_of(config), make)
    assert cached(root, "a" * 64, data, settings_of(config), make) == first and len(made) == 1
    assert first["weights"] == "a" * 64 and first["data"] == data
    assert cached(root, "b" * 64, data, settings_of(config), make)["greedy"] == 2
    assert cached(root, "a" * 64, rows_hash(ROWS[1:]), settings_of(config), make)["greedy"] == 3
    for other in ("trainer.seed=1", "evaluation.sampled_n=2", "reward.turn_weight=2", "agent.max_turns=3"):
        assert settings_of(compose("demo", [other]).config) != settings_of(config)
    for same in ("actor.optim.lr=1", "trainer.steps=1", "gate.alpha=0.1"):
        assert settings_of(compose("demo", [same]).config) == settings_of(config)
