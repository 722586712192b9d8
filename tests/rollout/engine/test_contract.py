"""What every engine does, against the trainer and against plain transformers, in float32."""

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import LENGTHS, complete, off_policy, plain_log_probs, policy_engine, rows_of, single_turns, update_alone
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rl_core.config.schema import OptimConfig
from rl_core.data.protocol import DataProto
from rl_core.errors import TrainingError
from rl_core.rollout.engine.protocol import Completion, RolloutEngine, Sampling
from rl_core.rollout.weights.canary import canary_of
from rl_core.rollout.weights.weight_sync import ShardingManager
from rl_core.storage.store import Store
from rl_core.training.engine import TrainEngine
from rl_core.training.mesh import RankMesh
from rl_core.training.sharded_checkpoint import export_model

END = 2
TOLERANCE = 1e-5
PROMPTS = [[4, 8, 9, 10, 2, 5], [4, 30, 2, 5], [4, 11, 12, 13, 14, 15, 16, 2, 5], [40]]
FIXED = [7, 8, 20, 21, 60, 3, 44, 9, 9, 1, 33, 50]
FREE = Sampling(1.0, 8, ())
GREEDY = Sampling(0.0, 8, ())


class Trainer:
    """A policy in training, with the sharding manager that pushes it into the engine."""

    def __init__(self, model: Path, rank_mesh: RankMesh, rollout: RolloutEngine) -> None:
        self.model, self.rank_mesh = model, rank_mesh
        self.engine: TrainEngine
        self.engine = policy_engine(model, rank_mesh, OptimConfig(lr=3e-2))
        self.sharding = ShardingManager(self.engine, rollout, "float32", TOLERANCE, 64)

    def train(self) -> None:
        """One large optimizer step, after which the policy is clearly another one."""
        update_alone(self.engine, off_policy(self.engine, rows_of(LENGTHS)))

    def export(self, folder: Path) -> PreTrainedModel:
        """The present policy as a plain transformers model."""
        export_model(self.engine, "float32", self.model, Store(str(folder)), "export")
        return AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32, attn_implementation="eager")


@pytest.fixture
def trainer(tiny_model: Path, rank_mesh: RankMesh, engine: RolloutEngine) -> Trainer:
    """A trainer at the saved weights, which the engine serves as version 0."""
    trainer = Trainer(tiny_model, rank_mesh, engine)
    trainer.sharding.push(0)
    return trainer


def prompts(n: int = 1) -> DataProto:
    return DataProto.from_dict({}, {"prompt_ids": PROMPTS * n, "seed": list(range(100, 100 + len(PROMPTS) * n))})


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def check_idle(engine: RolloutEngine) -> None:
    """Nothing of any request is left in the engine, and all places are free."""
    requests: Any = engine._requests  # type: ignore[attr-defined]
    assert not requests._under_way and not requests._waiting
    if hasattr(requests, "_running"):
        assert not requests._running
    else:
        assert requests.engine.output_processor.request_states == {}
        assert not requests._internal and not requests._by_number and requests._room == 256


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_sampled_tokens_are_the_trainers(
    trainer: Trainer, engine: RolloutEngine, temperature: float
) -> None:
    batch = single_turns(engine, prompts(4), Sampling(temperature, 8, (END,)))
    wanted_BR = trainer.engine.compute(batch, temperature)[0]
    torch.testing.assert_close(batch.batch["rollout_log_probs"], wanted_BR, rtol=0, atol=TOLERANCE)


def test_log_probs_of_given_tokens_are_the_plain_models(
    trainer: Trainer, engine: RolloutEngine, tiny_model: Path
) -> None:
    wanted = plain_log_probs(tiny_model, FIXED[:1], FIXED[1:])
    torch.testing.assert_close(torch.tensor(engine.log_probs(FIXED)), wanted, rtol=0, atol=TOLERANCE)


def test_a_seed_gives_the_same_response_alone_and_in_a_batch(trainer: Trainer, engine: RolloutEngine) -> None:
    together = complete(engine, PROMPTS, [1, 2, 3, 4], FREE)
    alone = [complete(engine, [prompt], [seed], FREE)[0] for prompt, seed in zip(PROMPTS, [1, 2, 3, 4], strict=True)]
    assert [c.token_ids for c in alone] == [c.token_ids for c in together]
    other = complete(engine, PROMPTS, [5, 6, 7, 8], FREE)
    assert all(a.token_ids != b.token_ids for a, b in zip(together, other, strict=True))
    same_prompt = complete(engine, [PROMPTS[0]] * 4, [1, 2, 3, 4], FREE)
    assert len({tuple(c.token_ids) for c in same_prompt}) == 4


def test_greedy_is_the_plain_models_whatever_the_seed(trainer: Trainer, engine: RolloutEngine, tmp_path: Path) -> None:
    trainer.train()
    trainer.sharding.push(1)
    model = trainer.export(tmp_path)
    wanted = [greedy(model, prompt, 8) for prompt in PROMPTS]
    for seed in (0, 1):
        completions = complete(engine, PROMPTS, [seed] * len(PROMPTS), GREEDY)
        assert [c.token_ids for c in completions] == wanted


def test_a_response_ends_with_its_stop_token_or_at_its_length(trainer: Trainer, engine: RolloutEngine) -> None:
    (free,) = complete(engine, [PROMPTS[0]], [1], FREE)
    assert free.stop_reason == "length" and len(free.token_ids) == len(free.log_probs) == 8
    stop = next(token for token in free.token_ids[2:] if token not in free.token_ids[:2])
    (ended,) = complete(engine, [PROMPTS[0]], [1], Sampling(1.0, 8, (63, stop)))
    cut = free.token_ids.index(stop) + 1
    assert ended == Completion(PROMPTS[0], free.token_ids[:cut], ended.log_probs, [0] * cut, "stop")
    assert ended.log_probs == pytest.approx(free.log_probs[:cut], abs=TOLERANCE)
    (short,) = complete(engine, [PROMPTS[0]], [1], Sampling(1.0, 2, (stop,)))
    assert short.token_ids == free.token_ids[:2] and short.stop_reason == "length"


def test_no_token_ends_a_response_unasked(trainer: Trainer, engine: RolloutEngine) -> None:
    # The model's own end token too is an ordinary one unless the sampling names it.
    completions = complete(engine, [[END]] * 64, list(range(64)), Sampling(1.0, 8, ()))
    assert any(END in c.token_ids[:-1] for c in completions)
    assert {len(c.token_ids) for c in completions} == {8}


def test_a_push_makes_the_engine_serve_the_trained_weights(
    trainer: Trainer, engine: RolloutEngine, tmp_path: Path
) -> None:
    before = torch.tensor(engine.log_probs(FIXED))
    assert {v for c in complete(engine, PROMPTS, [0] * 4, FREE) for v in c.versions} == {0}
    trainer.train()
    # Without the push the engine still serves the old policy, and the trainer's is another.
    assert torch.equal(torch.tensor(engine.log_probs(FIXED)), before)
    model = trainer.export(tmp_path)
    logits_TV = model(torch.tensor([FIXED])).logits[0, :-1]
    wanted = logits_TV.log_softmax(-1).gather(1, torch.tensor(FIXED[1:])[:, None]).squeeze(1)
    assert (wanted - before).abs().max() > 0.1
    assert 0 <= trainer.sharding.push(7) < TOLERANCE
    torch.testing.assert_close(torch.tensor(engine.log_probs(FIXED)), wanted, rtol=0, atol=TOLERANCE)
    assert {v for c in complete(engine, PROMPTS, [0] * 4, FREE) for v in c.versions} == {7}
    batch = single_turns(engine, prompts(), FREE)
    assert batch.batch["version"].tolist() == [[7] * 8] * 4
    log_probs_BR = trainer.engine.compute(batch, 1.0)[0]
    torch.testing.assert_close(batch.batch["rollout_log_probs"], log_probs_BR, rtol=0, atol=TOLERANCE)


def test_a_prompt_that_was_cached_is_computed_anew_after_a_push(
    trainer: Trainer, engine: RolloutEngine, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(3, 64, (50,), generator=generator).tolist()  # longer than a block of the cache
    sampling = Sampling(1.0, 8, ())
    before = complete(engine, [prompt] * 2, [1, 2], sampling)
    trainer.train()
    trainer.sharding.push(1)
    batch = single_turns(engine, DataProto.from_dict({}, {"prompt_ids": [prompt] * 2, "seed": [1, 2]}), GREEDY)
    wanted = greedy(trainer.export(tmp_path), prompt, 8)
    assert batch.batch["responses"].tolist() == [wanted] * 2
    after = single_turns(engine, DataProto.from_dict({}, {"prompt_ids": [prompt] * 2, "seed": [1, 2]}), FREE)
    wanted_BR = trainer.engine.compute(after, 1.0)[0]
    torch.testing.assert_close(after.batch["rollout_log_probs"], wanted_BR, rtol=0, atol=TOLERANCE)
    assert [c.token_ids for c in before] != after.batch["responses"].tolist()


def test_a_push_without_the_tied_head_is_caught(
    trainer: Trainer, engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trainer.engine.full_parameters

    def without_head(merged: bool) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in whole() if name != "lm_head.weight")

    trainer.train()
    with monkeypatch.context() as patch:
        patch.setattr(trainer.engine, "full_parameters", without_head)
        with pytest.raises(TrainingError, match="push of weights version 1"):
            trainer.sharding.push(1)
    assert trainer.sharding.push(2) < TOLERANCE


@pytest.mark.parametrize("lost", ["k_proj.weight", "model.norm.weight"])  # the first is a part of a fused weight
def test_a_push_that_leaves_a_weight_out_is_caught(
    trainer: Trainer, engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    whole = trainer.engine.full_parameters
    with monkeypatch.context() as patch:
        patch.setattr(trainer.engine, "full_parameters", lambda merged: (w for w in whole() if not w[0].endswith(lost)))
        with pytest.raises(TrainingError, match=f"version 1 did not update 1 weights.*{lost}"):
            trainer.sharding.push(1)
    assert trainer.sharding.push(2) < TOLERANCE


def test_weights_that_were_changed_on_the_way_are_caught(
    trainer: Trainer, engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trainer.engine.full_parameters

    def changed(merged: bool) -> Iterator[tuple[str, Tensor]]:
        return ((n, t * 1.05 if n.endswith("o_proj.weight") else t) for n, t in whole())

    monkeypatch.setattr(trainer.engine, "full_parameters", changed)
    with pytest.raises(TrainingError):
        trainer.sharding.push(1)


def test_a_turn_goes_on_over_a_push_and_knows_which_weights_wrote_which_token(
    trainer: Trainer, engine: RolloutEngine, tmp_path: Path
) -> None:
    """What comes after the push is what the new weights say after all tokens, whichever weights wrote them."""
    other = Trainer(trainer.model, trainer.rank_mesh, engine)
    other.train()

    async def interrupted() -> Completion:
        turn = asyncio.create_task(engine.generate(PROMPTS[0], 1, Sampling(0.0, 32, ())))
        for _ in range(8):
            await asyncio.sleep(0)
        engine.pause()
        other.sharding.push(9)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not turn.done()
        engine.resume()
        return await turn

    completion = asyncio.run(interrupted())
    before = completion.versions.count(0)
    assert completion.versions == [0] * before + [9] * (32 - before) and 2 <= before <= 10
    old = AutoModelForCausalLM.from_pretrained(trainer.model, dtype=torch.float32, attn_implementation="eager")
    assert completion.token_ids[:before] == greedy(old, PROMPTS[0], before)
    told = PROMPTS[0] + completion.token_ids[:before]
    assert completion.token_ids[before:] == greedy(other.export(tmp_path), told, 32 - before)


def test_the_canary_does_not_wait_for_turns_that_wait(
    trainer: Trainer, engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More turns than the engine decodes at a time are under way; the push must not decode them first, nor need a slot
    that one of them has."""
    steps: list[int] = []
    requests: Any = engine._requests  # type: ignore[attr-defined]
    step = requests._step

    def counted() -> None:
        steps.append(1)
        step()

    monkeypatch.setattr(requests, "_step", counted)

    async def pushed() -> int:
        turns = [asyncio.create_task(engine.generate(PROMPTS[i % 4], i, Sampling(1.0, 40, ()))) for i in range(300)]
        while len(steps) < 3:
            await asyncio.sleep(0)
        engine.pause()
        before = len(steps)
        assert len(requests._waiting) == 300 - 256
        trainer.sharding.push(1)
        taken = len(steps) - before
        engine.resume()
        await asyncio.gather(*turns)
        return taken

    assert asyncio.run(pushed()) <= 3


def test_a_cancelled_turn_is_freed_and_the_others_go_on(trainer: Trainer, engine: RolloutEngine) -> None:
    alone = complete(engine, PROMPTS[1:2], [2], FREE)[0]

    async def two() -> Completion:
        lost = asyncio.create_task(engine.generate(PROMPTS[0], 1, Sampling(1.0, 40, ())))
        kept = asyncio.create_task(engine.generate(PROMPTS[1], 2, FREE))
        for _ in range(3):
            await asyncio.sleep(0)
        lost.cancel()
        return await kept

    assert asyncio.run(two()).token_ids == alone.token_ids
    complete(engine, PROMPTS, [0] * 4, FREE)
    check_idle(engine)


def test_turns_that_are_cancelled_before_their_turn_leave_all_places_free(
    trainer: Trainer, engine: RolloutEngine
) -> None:
    requests: Any = engine._requests  # type: ignore[attr-defined]

    async def many() -> None:
        turns = [asyncio.create_task(engine.generate(PROMPTS[0], i, FREE)) for i in range(256 + 40)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(requests._waiting) == 40
        for lost in (turns[0], turns[-1]):
            lost.cancel()
        await asyncio.gather(*turns, return_exceptions=True)

    asyncio.run(many())
    check_idle(engine)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.5, 0), (1.0, 3)])
def test_only_the_likeliest_tokens_are_drawn(trainer: Trainer, engine: RolloutEngine, top_p: float, top_k: int) -> None:
    sampling = Sampling(1.0, 1, (), top_p, top_k)
    seen = {c.token_ids[0]: c.log_probs[0] for c in complete(engine, [FIXED] * 64, list(range(64)), sampling)}
    everything = {c.token_ids[0] for c in complete(engine, [FIXED] * 64, list(range(64)), Sampling(1.0, 1, ()))}
    assert len(seen) < len(everything) and (not top_k or len(seen) <= top_k)
    # Log-probs are of the tokens that may be drawn, so their probabilities add up to 1 when all of them were.
    assert sum(math.exp(log_prob) for log_prob in seen.values()) <= 1 + 1e-5


def test_log_probs_come_only_where_they_are_asked_for(trainer: Trainer, engine: RolloutEngine) -> None:
    (with_them,) = complete(engine, PROMPTS[:1], [3], FREE)
    (without,) = complete(engine, PROMPTS[:1], [3], Sampling(1.0, 8, (), log_probs=False))
    assert without.token_ids == with_them.token_ids and without.log_probs == [] and len(with_them.log_probs) == 8


def test_the_canary_fits_a_short_context(trainer: Trainer, engine: RolloutEngine) -> None:
    sharding = ShardingManager(trainer.engine, engine, "float32", TOLERANCE, max_length=10)
    assert sharding.push(1) < TOLERANCE
    assert len(canary_of(trainer.engine, 10).token_ids) == 9


def test_sleeping_and_waking_keeps_the_weights(trainer: Trainer, engine: RolloutEngine) -> None:
    before = complete(engine, PROMPTS, [0] * 4, GREEDY)
    engine.sleep()
    trainer.sharding.push(0)
    assert [c.token_ids for c in complete(engine, PROMPTS, [0] * 4, GREEDY)] == [c.token_ids for c in before]


@pytest.mark.parametrize("length", [0, 64])
def test_a_prompt_that_does_not_fit_fails_alone(trainer: Trainer, engine: RolloutEngine, length: int) -> None:
    async def two() -> list[Completion | BaseException]:
        turns = [engine.generate([5] * length, 1, FREE), engine.generate(PROMPTS[0], 1, FREE)]
        return await asyncio.gather(*turns, return_exceptions=True)

    refused, kept = asyncio.run(two())
    assert isinstance(refused, ValueError) and f"a prompt of {length} tokens; the rollout engine takes 1 to 63" in str(
        refused
    )
    assert kept == complete(engine, PROMPTS[:1], [1], FREE)[0]


def test_a_turn_ends_at_the_longest_sequence(trainer: Trainer, engine: RolloutEngine) -> None:
    (turn,) = complete(engine, [[5] * 60], [1], FREE)
    assert len(turn.token_ids) == 4 and turn.stop_reason == "length"


def test_an_error_of_the_engine_fails_all_requests(
    trainer: Trainer, engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(engine._requests, "_step", broken)  # type: ignore[attr-defined]

        async def four() -> list[Completion | BaseException]:
            return await asyncio.gather(*(engine.generate(ids, 1, FREE) for ids in PROMPTS), return_exceptions=True)

        assert [str(error) for error in asyncio.run(four())] == ["lost"] * 4
    assert len(complete(engine, PROMPTS, [1] * 4, FREE)) == 4
    check_idle(engine)


def test_each_token_of_the_vocabulary_is_drawn_as_often_as_its_log_prob_says(
    trainer: Trainer, engine: RolloutEngine, tiny_model: Path
) -> None:
    """Of one distribution over all tokens, the last included."""
    drawn = complete(engine, [FIXED] * 4000, list(range(4000)), Sampling(1.0, 1, ()))
    counts = Counter(turn.token_ids[0] for turn in drawn)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    wanted_V = 4000 * model(torch.tensor([FIXED])).logits[0, -1].softmax(-1)
    seen_V = torch.tensor([counts[token] for token in range(len(wanted_V))])
    often_V = wanted_V >= 5
    statistic = ((seen_V - wanted_V).square() / wanted_V)[often_V].sum().item()
    freedom = int(often_V.sum()) - 1
    assert freedom >= 10 and statistic < freedom + 4 * math.sqrt(2 * freedom)  # four standard deviations
    assert seen_V[~often_V].sum() <= wanted_V[~often_V].sum() + 4 * wanted_V[~often_V].sum().sqrt() + 1
    log_prob_V = (wanted_V / 4000).log()
    for turn in drawn[:500]:
        assert turn.log_probs[0] == pytest.approx(log_prob_V[turn.token_ids[0]].item(), abs=TOLERANCE)
