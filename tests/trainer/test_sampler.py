"""The way from prompts to a step's batch, with a rollout engine and scorers that play recorded parts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from support_scoring import with_results

from rl_core.algorithms.advantages import group_index
from rl_core.config.schema import RunConfig
from rl_core.data.dataset import RLHFDataset
from rl_core.data.loader import StatefulLoader
from rl_core.data.protocol import DataProto
from rl_core.data.rows import make_row
from rl_core.errors import InputError, TrainingError
from rl_core.models.tiny import build_tokenizer
from rl_core.rewards.worker import RewardResult, failure
from rl_core.rollout.engine.protocol import Completion
from rl_core.rollout.trajectory import Trajectory, to_batch
from rl_core.trainer.metrics import Phases
from rl_core.trainer.rollout_queue import RolloutQueue
from rl_core.trainer.sampler import Sampler

TOKENIZER = build_tokenizer()
N, WIDTH = 3, 8
ROWS = [make_row("sort_digits", f"{i} 1 0", "sorting", "0", "0", "train", i) for i in range(12)]


@dataclass
class Scorer:
    """Scores by row: those in `useful` have groups that differ, all others get 1 for every response."""

    useful: set[int]
    broken: set[int] = field(default_factory=set)

    def one(self, text: str, row: int) -> RewardResult:
        assert int(text[:2]) == row, "a response was scored with another prompt's row"
        if row in self.broken and text[-1] == "0":
            return failure("error", "broken")
        if text[-1] == "9":
            return RewardResult(row / 100, "ok")
        return RewardResult(float(text[-1] == "2") if row in self.useful else 1.0, "ok")


@dataclass
class Actor:
    """Answers each prompt with its row's number and its place in the group, greedily with a 9, and has it scored."""

    version: int = 0
    scorer: Scorer | None = None
    temperatures: list[float] = field(default_factory=list)
    sleeps: int = 0
    seeds: list[int] = field(default_factory=list)

    def submit(self, prompts: DataProto, temperature: float) -> SimpleNamespace:
        self.temperatures.append(temperature)
        rows = prompts.non_tensor_batch
        self.seeds += rows["seed"].tolist()
        answers = []
        for place, row in enumerate(rows["row"]):
            text = f"{row['extra_info']['index']:02d}" + (f"{place % N}" * (1 + place % N) if temperature else "9")
            answers.append(TOKENIZER.encode(text))
        assert self.scorer
        trajectories, results = [], []
        for ids, a in zip(rows["prompt_ids"], answers, strict=True):
            trajectory = Trajectory(list(ids), 0)
            trajectory.take(Completion(list(ids), a, [-0.5] * len(a), [self.version] * len(a), "stop"))
            trajectories.append(trajectory)
        for row, answer in zip(rows["row"], answers, strict=True):
            results.append(self.scorer.one(str(TOKENIZER.decode(answer)).replace(" ", ""), row["extra_info"]["index"]))
        batch = with_results(prompts.union(to_batch(trajectories, WIDTH)), results)
        return SimpleNamespace(get=lambda: batch)

    def sleep(self) -> None:
        self.sleeps += 1


def sampler(scorer: Scorer, actor: Actor | None = None, **sections: Mapping[str, object]) -> Sampler:
    config = RunConfig.model_validate(
        {
            "data": {"train_batch_size": 2, "max_response_length": WIDTH},
            "rollout": {"n": N, "temperature": 0.7},
            "reward": {"max_failed_share": 0.5},
            **sections,
        }
    )
    loader = StatefulLoader([len(ROWS)], 2, config.trainer.seed, "hash")
    actor = actor or Actor()
    actor.scorer = scorer
    roles = SimpleNamespace(rollout=actor, model_scores=None)
    queue = RolloutQueue(config, RLHFDataset(ROWS, TOKENIZER), loader, roles)  # type: ignore[arg-type]
    return Sampler(config, queue, TOKENIZER)


def order_of(made: Sampler) -> list[int]:
    """Row numbers in the order in which the loader will give them."""
    fresh = StatefulLoader([len(ROWS)], 2, made.config.trainer.seed, "hash")
    return [row for _ in range(6) for row in fresh.next()]


def rows_in(batch: DataProto) -> list[int]:
    return [row["extra_info"]["index"] for row in batch.non_tensor_batch["row"]]


DYNAMIC = {"max_generated_batches": 4}


def test_without_dynamic_sampling_the_next_prompts_are_the_batch() -> None:
    actor = Actor()
    made = sampler(Scorer(set()), actor)
    batch, metrics = made.batch(1, Phases())
    first = order_of(made)[:2]
    assert rows_in(batch) == [first[0]] * N + [first[1]] * N and metrics == {}
    assert actor.temperatures == [0.7] and actor.sleeps == 1 and made.queue.loader.state_dict()["positions"] == [2]
    assert batch.batch["token_level_scores"].sum(-1).tolist() == [1.0] * 6


def test_groups_of_equal_scores_are_dropped_and_refilled() -> None:
    probe = order_of(sampler(Scorer(set())))
    useful = {probe[1], probe[4]}  # one in the first generated batch, one in the third
    actor = Actor()
    made = sampler(Scorer(useful), actor, algorithm=DYNAMIC)
    batch, metrics = made.batch(1, Phases())
    assert rows_in(batch) == [probe[1]] * N + [probe[4]] * N
    # Six prompts of three responses were scored, and in the two useful groups some of them 0.
    score = metrics.pop("sampling/generated_score")
    assert metrics == {"sampling/generated_batches": 3.0, "sampling/useful_share": 1.0}
    kept = batch.batch["token_level_scores"].sum(-1)
    assert score == pytest.approx((4 * N + kept.sum().item()) / (6 * N))
    assert made.queue.loader.state_dict()["positions"] == [6], "the loader stands behind all prompts that were used"
    assert len(set(actor.seeds)) == 3 * 2 * N, "a refill repeats another one's random numbers"
    uid = batch.non_tensor_batch["uid"].tolist()
    assert [len(set(uid[k : k + N])) for k in (0, N)] == [1, 1] and len(set(uid)) == 2


def test_enough_useful_groups_stop_the_sampling_and_the_rest_is_cut() -> None:
    probe = order_of(sampler(Scorer(set())))
    made = sampler(Scorer({probe[0], probe[2], probe[3]}), algorithm=DYNAMIC)
    batch, metrics = made.batch(1, Phases())
    assert rows_in(batch) == [probe[0]] * N + [probe[2]] * N
    assert metrics["sampling/generated_batches"] == 2.0 and metrics["sampling/useful_share"] == 1.0
    # Both were the first prompt of their batch, but they are two groups.
    assert group_index(batch.non_tensor_batch["uid"].tolist()).tolist() == [0] * N + [1] * N


def test_at_the_cap_the_batch_is_filled_with_equal_groups() -> None:
    probe = order_of(sampler(Scorer(set())))
    made = sampler(Scorer({probe[5]}), algorithm=DYNAMIC)
    batch, metrics = made.batch(1, Phases())
    assert rows_in(batch) == [probe[5]] * N + [probe[0]] * N
    assert metrics["sampling/generated_batches"] == 4.0 and metrics["sampling/useful_share"] == 0.5


def test_at_the_cap_the_run_may_stop_instead() -> None:
    made = sampler(Scorer(set()), algorithm={**DYNAMIC, "when_too_few_groups": "stop"})
    with pytest.raises(TrainingError, match=r"step 1: 4 generated batches contain 0 groups .* \(minimum 2\)"):
        made.batch(1, Phases())


def test_a_group_with_a_lost_response_stays_whole() -> None:
    """Its other responses differ, so it is kept, with the lost one among its rows."""
    probe = order_of(sampler(Scorer(set())))
    made = sampler(Scorer({probe[0], probe[1]}, broken={probe[0]}), algorithm=DYNAMIC)
    batch, _ = made.batch(1, Phases())
    assert rows_in(batch) == [probe[0]] * N + [probe[1]] * N
    assert batch.batch["scored"].tolist() == [False] + [True] * 5
    # With one of three equal responses lost there is no spread left or made.
    made = sampler(Scorer({probe[2], probe[3]}, broken={probe[0], probe[1]}), algorithm=DYNAMIC)
    assert rows_in(made.batch(1, Phases())[0]) == [probe[2]] * N + [probe[3]] * N


def test_overlong_shaping_does_not_make_equal_groups_useful() -> None:
    """Lengths within a group differ, scores do not: the penalty comes after the choice."""
    probe = order_of(sampler(Scorer(set())))
    algorithm = {**DYNAMIC, "overlong_buffer": 6, "overlong_penalty": 0.6}
    made = sampler(Scorer({probe[4], probe[5]}), algorithm=algorithm)
    batch, metrics = made.batch(1, Phases())
    assert rows_in(batch) == [probe[4]] * N + [probe[5]] * N and metrics["sampling/generated_batches"] == 3.0
    # Responses of 3, 4 and 5 of 8 tokens, of which the last 6 cost 0.1 each.
    shaped_B = batch.batch["token_level_shaped"].sum(-1)
    assert shaped_B.tolist() == pytest.approx([-0.1, -0.2, 1 - 0.3] * 2)
    assert batch.batch["token_level_scores"].sum(-1).tolist() == [0, 0, 1] * 2, "scores stay what they were"
    last_B = batch.batch["response_length"] - 1
    assert shaped_B.tolist() == batch.batch["token_level_shaped"][torch.arange(6), last_B].tolist()


def test_remax_has_the_greedy_reward_of_each_prompt() -> None:
    actor = Actor()
    made = sampler(Scorer(set()), actor, algorithm={"estimator": "remax"})
    batch, _ = made.batch(1, Phases())
    assert actor.temperatures == [0.7, 0.0] and len(batch) == 2 * N
    wanted = [row / 100 for row in rows_in(batch)]
    assert batch.batch["greedy_reward_B"].tolist() == pytest.approx(wanted) and len(set(wanted)) == 2


def test_a_prompt_whose_greedy_response_has_no_score_trains_nothing() -> None:
    class GreedyFails(Scorer):
        def one(self, text: str, row: int) -> RewardResult:
            return failure("error", "broken") if text[-1] == "9" and row == first else super().one(text, row)

    first = order_of(sampler(Scorer(set())))[0]
    batch, _ = sampler(GreedyFails(set()), algorithm={"estimator": "remax"}).batch(1, Phases())
    assert rows_in(batch)[:N] == [first] * N
    assert not batch.batch["response_mask"][:N].any() and batch.batch["response_mask"][N:].any(-1).all()
    assert batch.batch["scored"].all(), "their own scores are there"
    rows = set(order_of(sampler(Scorer(set())))[:3])
    _, metrics = sampler(GreedyFails(rows), algorithm={"estimator": "remax", **DYNAMIC}).batch(1, Phases())
    assert metrics["sampling/generated_batches"] == 2.0, "it is refilled as if its scores were equal"


def test_generated_batches_may_have_different_named_rewards() -> None:
    class Names(Scorer):
        def one(self, text: str, row: int) -> RewardResult:
            result = super().one(text, row)
            return RewardResult(1.0, "ok", named={"right": 1.0}) if result.score and row in self.useful else result

    probe = order_of(sampler(Scorer(set())))
    made = sampler(Names({probe[1], probe[2]}), algorithm=DYNAMIC)
    batch, metrics = made.batch(1, Phases())
    assert metrics["sampling/generated_batches"] == 2.0
    assert batch.batch["reward_named/right"].tolist() == [0, 0, 1] * 2
    made = sampler(Names({probe[3], probe[4]}), algorithm=DYNAMIC)  # the first batch names none
    assert made.batch(1, Phases())[0].batch["reward_named/right"].tolist() == [0, 0, 1] * 2


def test_a_reward_that_a_whole_batch_does_not_name_is_not_learned_as_0() -> None:
    class Names(Scorer):
        def one(self, text: str, row: int) -> RewardResult:
            return RewardResult(1.0, "ok", named={"right": 1.0} if row in self.useful else {})

    probe = order_of(sampler(Scorer(set())))
    made = sampler(Names(set(probe[:2])), algorithm={"estimator": "gdpo", **DYNAMIC})
    with pytest.raises(InputError, match="the named rewards right for every response"):
        made.batch(1, Phases())


def test_remax_with_shuffled_rewards_takes_both_from_the_other_prompt() -> None:
    made = sampler(Scorer(set()), algorithm={"estimator": "remax"}, reward={"shuffle_control": True})
    batch, _ = made.batch(1, Phases())
    wanted = [row / 100 for row in rows_in(batch)]
    assert batch.batch["greedy_reward_B"].tolist() == pytest.approx(wanted[N:] + wanted[:N])


def test_responses_of_other_weights_are_refused() -> None:
    """The engine must serve the weights of the step before, no older and no newer ones."""
    assert len(sampler(Scorer(set()), Actor(version=4)).batch(5, Phases())[0]) == 2 * N
    for version in (3, 5):
        with pytest.raises(TrainingError, match=f"step 5 needs .* version 4; the engine served {version}"):
            sampler(Scorer(set()), Actor(version=version)).batch(5, Phases())


def test_a_resume_trains_on_the_batches_that_were_ahead() -> None:
    """Rollouts saved with a checkpoint are restored, later batches are generated again, and no prompt is skipped."""
    pool = {"mode": "async", "max_staleness": 2, "ranks_per_node": 1, "n": N, "temperature": 0.7}
    before = sampler(Scorer(set()), Actor(), rollout=pool).queue
    for step in (1, 2, 3):
        before.begin(step)
    before.take(1)
    state, saved = before.state_dict(), before.saved(2)
    assert saved is not None and [key["step"] for key in state["ahead"]] == [2, 3]

    actor = Actor(version=9)
    after = sampler(Scorer(set()), actor, rollout=pool).queue
    after.load_state_dict(state, saved)
    assert actor.temperatures == [0.7], "only the second batch is generated again"
    for step in (2, 3, 4):
        wanted, found = (queue.take(step)[0] for queue in (before, after))
        assert rows_in(found) == rows_in(wanted)
        for name in ("uid", "seed"):
            assert found.non_tensor_batch[name].tolist() == wanted.non_tensor_batch[name].tolist()
        assert found.batch["responses"].tolist() == wanted.batch["responses"].tolist()
        assert set(found.batch["version"].unique().tolist()) - {-1} == ({0} if step == 2 else {9})
