import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_scoring import with_results

from rl_core.config.schema import RunConfig
from rl_core.data.dataset import RLHFDataset
from rl_core.data.protocol import DataProto
from rl_core.data.rows import make_row
from rl_core.errors import InputError, TrainingError, TransientError
from rl_core.models.tiny import build_tokenizer
from rl_core.rewards.worker import RewardResult, failure, unreadable
from rl_core.rollout.scoring import score_columns
from rl_core.rollout.trajectory import Trajectory, to_batch
from rl_core.trainer import batch as batches
from rl_core.trainer.advantage import apply_kl, apply_rollout_correction
from rl_core.trainer.batch import balanced_order, log_probs_with_update, policy_filter, training_rows
from rl_core.trainer.reward_columns import assign_scores
from rl_core.trainer.rollout_file import rollout_parquet
from rl_core.trainer.trainer import PPOTrainer

TOKENIZER = build_tokenizer()
END = TOKENIZER.eos_token_id
ROWS = [make_row("sort_digits", f"{i} 1 0", "sorting", f"0 1 {i}", f"0 1 {i}", "train", i) for i in range(10)]


def config(**sections: Mapping[str, object]) -> RunConfig:
    return RunConfig.model_validate(
        {"data": {"train_batch_size": 4}, "rollout": {"n": 3}, "trainer": {"seed": 5}, **sections}
    )


def prompt_batch(run: RunConfig, step: int = 7, indices: tuple[int, ...] = (3, 1, 8, 4)) -> DataProto:
    return batches.prompt_batch(RLHFDataset(ROWS, TOKENIZER), list(indices), run, step)


def rolled_out(run: RunConfig, texts: list[str] | None = None) -> DataProto:
    """The prompts with made responses; the default ones are unlike each other, and of different lengths."""
    prompts = prompt_batch(run)
    texts = texts or [f"{i} {i}" + " 7" * (i % 4) for i in range(len(prompts))]
    answers = [[*TOKENIZER.encode(text), END] for text in texts]
    trajectories = [
        Trajectory(ids, 0, response_ids=answer, response_mask=[1] * len(answer), log_probs=[-0.5] * len(answer))
        for ids, answer in zip(prompts.non_tensor_batch["prompt_ids"], answers, strict=True)
    ]
    return prompts.union(to_batch(trajectories, 8))


def score(batch: DataProto, given: Sequence[RewardResult | float | None], run: RunConfig, step: int = 7) -> DataProto:
    """The batch after scores were given to its responses; None stands for a scorer that was too slow."""
    results = [each if isinstance(each, RewardResult) else result(each) for each in given]
    return assign_scores(with_results(batch, results), None, TOKENIZER, run, step)


def result(score: float | None) -> RewardResult:
    return failure("timeout", "too slow") if score is None else RewardResult(score, "ok")


def test_each_prompt_stands_n_times_with_its_row() -> None:
    batch = prompt_batch(config())
    columns = batch.non_tensor_batch
    assert len(batch) == 12
    assert [row["extra_info"]["index"] for row in columns["row"]] == [3] * 3 + [1] * 3 + [8] * 3 + [4] * 3
    assert columns["uid"].tolist() == [f"7-0-{place}" for place in range(4) for _ in range(3)]
    assert all("prompt_ids" not in row for row in columns["row"])
    wanted = TOKENIZER.apply_chat_template(ROWS[1]["prompt"], add_generation_prompt=True, return_dict=False)
    assert columns["prompt_ids"][3] == columns["prompt_ids"][5] == wanted


def test_a_prompt_that_comes_twice_in_a_step_is_two_groups() -> None:
    uid = prompt_batch(config(), indices=(2, 2, 3, 4)).non_tensor_batch["uid"]
    assert len(set(uid.tolist())) == 4


def test_seeds_are_the_same_for_the_same_step_and_distinct_otherwise() -> None:
    run = config()
    first, again = (prompt_batch(run, step).non_tensor_batch["seed"].tolist() for step in (7, 7))
    assert first == again
    following = prompt_batch(run, 8).non_tensor_batch["seed"].tolist()
    other_run = prompt_batch(config(trainer={"seed": 6}), 7).non_tensor_batch["seed"].tolist()
    assert len({*first, *following, *other_run}) == 3 * 12
    assert all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in first)


def test_scores_stand_on_the_last_token() -> None:
    run = config()
    batch = rolled_out(run)
    scored = score(batch, [i / 10 for i in range(12)], run)
    scores_BR, length_B = scored.batch["token_level_scores"], batch.batch["response_length"]
    assert scores_BR[torch.arange(12), length_B - 1].tolist() == pytest.approx([i / 10 for i in range(12)])
    assert scores_BR.sum().item() == pytest.approx(6.6)
    assert scored.batch["scored"].all()
    assert torch.equal(scored.batch["response_mask"], batch.batch["response_mask"])


def test_a_response_without_a_score_trains_nothing_and_leaves_its_group() -> None:
    run = config()
    batch = rolled_out(run)
    scored = score(batch, [1.0] * 4 + [None] + [1.0] * 7, run)
    assert scored.batch["scored"].tolist() == [True] * 4 + [False] + [True] * 7
    assert not scored.batch["response_mask"][4].any()
    others = [i for i in range(12) if i != 4]
    assert torch.equal(scored.batch["response_mask"][others], batch.batch["response_mask"][others])
    uid = scored.non_tensor_batch["uid"].tolist()
    assert uid.count("7-0-1") == 2 and uid.count(uid[4]) == 1
    assert batch.non_tensor_batch["uid"][4] == "7-0-1", "the batch that came in is changed"


def test_a_named_reward_that_is_missing_is_an_error_where_it_is_learned_from() -> None:
    whole = RewardResult(1.0, "ok", named={"format": 1.0, "answer": 0.5})
    part = RewardResult(1.0, "ok", named={"answer": 0.5})
    for run, results in ((config(), [whole, part]), (config(algorithm={"estimator": "gdpo"}), [whole, whole])):
        scored = score(rolled_out(run), results * 6, run)
        assert scored.batch["reward_named/format"].sum() == sum("format" in result.named for result in results) * 6
    run = config(algorithm={"estimator": "gdpo"})
    results = [*[whole] * 10, failure("timeout", "too slow"), part]
    with pytest.raises(InputError, match="the named rewards answer, format for every response\n.*seen: answer for one"):
        score(rolled_out(run), results, run)


@pytest.mark.parametrize("kind", ["max_random", "max_min", "pow"])
def test_policy_filtering_draws_no_response_without_a_score(kind: str) -> None:
    run = config(algorithm={"pf_ppo": kind})
    scored = score(rolled_out(run), [-1.0, -0.5, None, *[-1.0] * 9], run)
    for step in range(20):
        assert policy_filter(scored, run, step).batch["scored"].all()


def test_the_bounded_share_counts_what_was_cut_before_weights_are_normalised() -> None:
    run = config(correction={"weights": "token", "weight_bounds": (0.0, 2.0), "normalise": True})
    batch = score(rolled_out(run), [1.0] * 12, run)
    old_BR = batch.batch["rollout_log_probs"] + torch.log(torch.tensor(1.5)) * batch.batch["response_mask"]
    old_BR[0, 0] += 1.0  # a ratio of 4, cut to 2; the mean is above 1
    batch = batch.union(DataProto({"old_log_probs": old_BR}))
    _, metrics = apply_rollout_correction(batch, run.correction)
    assert metrics["correction/bounded_share"] == pytest.approx(1 / batch.batch["response_mask"].sum().item())


def test_two_lost_responses_are_not_a_group_of_their_own() -> None:
    run = config(reward={"max_failed_share": 0.5})
    uid = score(rolled_out(run), [None, None] + [1.0] * 10, run).non_tensor_batch["uid"]
    assert len({uid[0], uid[1], uid[2]}) == 3


def test_a_reward_model_adds_to_what_the_scorers_gave() -> None:
    class Model:
        def added(
            self, results: list[RewardResult], rows: list[dict[str, Any]], responses: list[str]
        ) -> list[RewardResult]:
            assert rows == batch.non_tensor_batch["row"].tolist() and responses[:2] == ["00", "117"]
            return [RewardResult((each.score or 0) + 1, "ok") for each in results[:-1]] + [failure("non_finite", "nan")]

    run = config()
    batch = rolled_out(run)
    given = with_results(batch, [RewardResult(i / 10, "ok") for i in range(12)])
    scored = assign_scores(given, Model(), TOKENIZER, run, 7)
    wanted = [1 + i / 10 for i in range(11)] + [0]
    assert scored.batch["token_level_scores"].sum(-1).tolist() == pytest.approx(wanted)
    assert scored.non_tensor_batch["score_status"].tolist() == ["ok"] * 11 + ["non_finite"]


def test_too_many_responses_without_a_score_are_a_transient_error() -> None:
    run = config(reward={"max_failed_share": 0.25})
    batch = rolled_out(run)
    score(batch, [None] * 3 + [1.0] * 9, run)
    with pytest.raises(TransientError, match="step 7: 4 of 12 .*max_failed_share=0.25.*timeout: too slow"):
        score(batch, [None] * 4 + [1.0] * 8, run)


@pytest.mark.parametrize("status", ["invalid", "non_finite"])
def test_mistakes_of_a_scorer_are_not_retried(status: Any) -> None:
    run = config(reward={"max_failed_share": 0.25})
    mistake, late, fine = failure(status, "it is wrong"), failure("timeout", "too slow"), RewardResult(1.0, "ok")
    batch = rolled_out(run).union(score_columns([mistake] * 4 + [fine] * 8, 0.0))
    with pytest.raises(InputError, match=f"4 of 12 responses without a score; the first: {status}: it is wrong"):
        assign_scores(batch, None, TOKENIZER, run, 7)
    batch = rolled_out(run).union(score_columns([mistake] * 3 + [late] + [fine] * 8, 0.0))
    with pytest.raises(TransientError, match="4 of 12"):
        assign_scores(batch, None, TOKENIZER, run, 7)


def test_an_unreadable_response_is_trained_with_its_score_of_0() -> None:
    run = config(reward={"max_failed_share": 0.0})
    results = [unreadable("math", "a tower of powers")] * 6 + [RewardResult(1.0, "ok")] * 6
    scored = assign_scores(rolled_out(run).union(score_columns(results, 0.0)), None, TOKENIZER, run, 7)
    assert scored.batch["scored"].all() and scored.batch["token_level_scores"].sum().item() == 6
    assert scored.non_tensor_batch["score_status"].tolist() == ["unreadable"] * 6 + ["ok"] * 6


@pytest.mark.parametrize("step", range(20))
def test_the_shuffle_control_hands_each_prompts_rewards_to_another(step: int) -> None:
    run = config(reward={"shuffle_control": True, "max_failed_share": 0.5})
    batch = rolled_out(run)
    given: list[RewardResult | float | None] = [float(i) for i in range(12)]
    scored = score(batch, given, run, step)
    groups = scored.batch["token_level_scores"].sum(-1).view(4, 3).tolist()
    wanted = [[float(3 * g + k) for k in range(3)] for g in range(4)]
    assert sorted(groups) == wanted
    assert all(seen != own for seen, own in zip(groups, wanted, strict=True))
    assert torch.equal(score(batch, given, run, step).batch["token_level_scores"], scored.batch["token_level_scores"])
    # A failure goes along with its place, instead of becoming another response's 0.
    given[4] = None
    lost = score(batch, given, run, step).batch["scored"].tolist()
    assert lost == [value != 4 for group in groups for value in group]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=48, max_size=48),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
)
def test_the_balanced_order_keeps_mini_batches_within_the_shares(
    lengths: list[int], world: int, mini: int, sharing: int
) -> None:
    """A share is that of a data-parallel group, which `sharing` ranks form together."""
    engine = {"sequence_parallel_size": sharing}
    sections = {"actor": {"mini_batch_size": mini}, "trainer": {"ranks_per_node": world * sharing}, "fsdp": engine}
    run = config(rollout={"n": 12}, **sections)
    tensors = {"prompt_length": torch.tensor(lengths), "response_length": torch.full((48,), 2)}
    order = balanced_order(DataProto(tensors), run)
    assert sorted(order) == list(range(48))
    per_mini, share = mini * 12, 48 // world
    for k in range(48 // per_mini):
        part = per_mini // world
        parts = [order[rank * share + k * part : rank * share + (k + 1) * part] for rank in range(world)]
        assert sorted(row for rows in parts for row in rows) == list(range(k * per_mini, (k + 1) * per_mini))
        loads = [sum(lengths[i] for i in rows) for rows in parts]
        assert world == 1 or max(loads) - min(loads) <= max(lengths)


def test_ranks_get_equal_numbers_of_tokens_where_lengths_allow_it() -> None:
    run = config(rollout={"n": 12}, trainer={"ranks_per_node": 2})
    length_B = torch.arange(48)
    tensors = {"prompt_length": length_B, "response_length": torch.zeros_like(length_B)}
    order = balanced_order(DataProto(tensors), run)
    assert length_B[order].view(2, 24).sum(-1).tolist() == [564, 564]


def test_one_rank_keeps_the_order() -> None:
    run = config()
    assert balanced_order(rolled_out(run), run) == list(range(12))


def test_kl_lowers_the_rewards_token_by_token() -> None:
    mask_BR = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    batch = DataProto(
        {
            "token_level_shaped": torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.0]]),
            "response_mask": mask_BR,
            "old_log_probs": torch.tensor([[-1.0, -2.0, -7.0], [-3.0, -7.0, -7.0]]),
            "ref_log_prob": torch.tensor([[-1.5, -1.0, -1.0], [-3.0, -1.0, -1.0]]),
        }
    )
    rewarded, metrics = apply_kl(batch, "k1", 0.1)
    wanted = torch.tensor([[-0.05, 1.1, 0.0], [0.5, 0.0, 0.0]])
    torch.testing.assert_close(rewarded.batch["token_level_rewards"], wanted)
    assert metrics == {
        "kl/ref": pytest.approx((math.exp(-0.5) - 0.5 + math.e - 2) / 3),
        "kl/ref_k1": pytest.approx(-0.5 / 3),
    }
    batch.pop(["ref_log_prob"])
    unchanged, nothing = apply_kl(batch, "k1", 0.1)
    assert torch.equal(unchanged.batch["token_level_rewards"], batch.batch["token_level_shaped"]) and nothing == {}


def test_the_steps_trajectories_are_written_without_padding(tmp_path: Path) -> None:
    run = config()
    batch = score(rolled_out(run), [1.0] * 11 + [None], run)
    # Prompts as wide as responses are prompts still.
    wide = torch.nn.functional.pad(batch.batch["prompts"], (0, 8 - batch.batch["prompts"].shape[1]))
    batch = DataProto({**batch.batch, "prompts": wide}, batch.non_tensor_batch)
    batch = batch.union(DataProto({"old_log_probs": torch.full((12, 8), -0.25)}))
    table = pq.read_table(io.BytesIO(rollout_parquet(batch)))
    per_token = {"responses", "response_mask", "rollout_log_probs", "version", "token_level_scores", "old_log_probs"}
    per_row = {"uid", "seed", "stop_reason", "status", "detail", "calls", "row", "scored"}
    per_row |= {"answer_start", "turns", "turn_reward", "data_source"}
    per_row |= {"score_status", "score_detail", "score_seconds", "score_wait"}
    assert set(table.column_names) == per_token | per_row | {"prompt_ids"}
    lengths = batch.batch["response_length"].tolist()
    rows = table.to_pylist()
    assert len(rows) == 12
    for i, row in enumerate(rows):
        assert {len(row[name]) for name in per_token} == {lengths[i]}
        assert row["prompt_ids"] == batch.non_tensor_batch["prompt_ids"][i]
        assert row["responses"] == batch.batch["responses"][i, : lengths[i]].tolist()
        assert row["token_level_scores"] == [0.0] * (lengths[i] - 1) + [float(i < 11)]
        assert row["seed"] == batch.non_tensor_batch["seed"][i]
    assert {row["data_source"] for row in rows} == {"sort_digits"}
    assert [row["score_status"] for row in rows] == ["ok"] * 11 + ["timeout"]
    assert [row["row"] for row in rows] == list(np.repeat([3, 1, 8, 4], 3))


@pytest.mark.parametrize(
    ("sections", "merged"),
    [
        ({}, True),
        ({"algorithm": {"estimator": "gae"}}, True),
        ({"actor": {"policy_loss": "cispo", "entropy_coef": 0.1}}, True),
        ({"actor": {"ppo_epochs": 2}}, False),
        ({"actor": {"mini_batch_size": 2}}, False),
        ({"actor": {"mini_batch_size": 4}}, True),
        ({"actor": {"policy_loss": "kl_cov"}}, False),
        ({"actor": {"kl_loss_coef": 0.1}}, False),
        ({"algorithm": {"kl_in_reward_coef": 0.1}}, False),
        ({"algorithm": {"estimator": "optimal_token_baseline"}}, False),
        ({"algorithm": {"pf_ppo": "pow"}}, False),
        ({"correction": {"weights": "token"}}, False),
        ({"correction": {"reject": "token"}}, False),
    ],
)
def test_log_probs_come_with_the_update_if_nothing_reads_them_before(sections: dict[str, Any], merged: bool) -> None:
    assert log_probs_with_update(config(**sections)) is merged


@pytest.mark.parametrize("fails", [False, True])
def test_log_probs_of_an_update_reach_the_rows_that_they_belong_to(fails: bool) -> None:
    """With two ranks the workers see the rows in another order; a failed update gives them too, for its replay."""
    run = config(trainer={"ranks_per_node": 2}, data={"train_batch_size": 4, "max_response_length": 8})
    batch = rolled_out(run)
    rows = training_rows(batch, run, 1)
    wanted_BR = batch.batch["responses"] / 7
    assert not torch.equal(rows.batch["responses"], batch.batch["responses"])

    def log_probs(data: DataProto) -> DataProto:
        return DataProto({"old_log_probs": data.batch["responses"] / 7})

    def update(data: DataProto) -> tuple[DataProto, dict[str, float]]:
        if fails:
            raise TrainingError("not finite")
        return log_probs(data), {"loss": 0.5}

    trainer = PPOTrainer.__new__(PPOTrainer)
    actor = SimpleNamespace(update_actor=update, compute_log_prob=log_probs)
    trainer.config, trainer.roles = run, cast(Any, SimpleNamespace(actor=actor))
    if fails:
        with pytest.raises(TrainingError):
            trainer._update(batch, rows)
    else:
        assert trainer._update(batch, rows) == {"actor/loss": 0.5}
    assert torch.equal(batch.batch["old_log_probs"], wanted_BR)
