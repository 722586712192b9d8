"""What must hold for advantage estimators whatever the batch is."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_core.algorithms.advantages import ESTIMATORS
from rl_core.config.learning import GROUP_ESTIMATORS

R = 6
EVERY = sorted(ESTIMATORS.entries)
# Those for which only differences within a group count. gpg's factor depends on which rewards are 0, and the token
# baseline has none behind the second longest response.
SHIFT_FREE = ["dr_grpo", "gdpo", "grpo", "grpo_passk", "opo", "reinforce_plus_plus_baseline", "rloo"]


@dataclass
class Batch:
    """Everything that some estimator takes."""

    rewards_BR: Tensor
    mask_BR: Tensor
    group_B: Tensor
    values_BR: Tensor
    old_log_probs_BR: Tensor
    sum_pi_squared_BR: Tensor
    greedy_reward_B: Tensor
    named_B: dict[str, Tensor]

    def take(self, rows: Tensor) -> "Batch":
        columns = {k: v[rows] for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **columns, named_B={k: v[rows] for k, v in self.named_B.items()})

    def estimate(self, name: str) -> tuple[Tensor, Tensor]:
        entry = ESTIMATORS.resolve(name)
        others = {"named_rewards": self.named_B, "reward_weights": {"short": 0.5}, "gamma": 0.97, "lam": 0.9}
        given = {**vars(self), **others}
        return entry.function(
            self.rewards_BR, self.mask_BR, self.group_B, **{need: given[need] for need in entry.needs}
        )


def made(sizes: list[int], seed: int) -> Batch:
    """Groups of these sizes, rows shuffled; masks with gaps; rewards are eighths, so that sums are exact."""
    g = torch.Generator().manual_seed(seed)
    rows = sum(sizes)
    group_B = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[torch.randperm(rows, generator=g)]
    length_B = torch.randint(1, R + 1, (rows,), generator=g)
    mask_BR = (torch.arange(R) < length_B[:, None]).float()
    gap_BR = torch.rand(rows, R, generator=g) < 0.3
    gap_BR[torch.arange(rows), length_B - 1] = False
    mask_BR[gap_BR] = 0

    def eighths(*shape: int) -> Tensor:
        return torch.randint(-4, 9, shape, generator=g) / 8

    rewards_BR = torch.zeros(rows, R)
    rewards_BR[torch.arange(rows), length_B - 1] = eighths(rows)
    return Batch(
        rewards_BR,
        mask_BR,
        group_B,
        torch.randn(rows, R, generator=g),
        -torch.rand(rows, R, generator=g) * 3,
        torch.rand(rows, R, generator=g),
        eighths(len(sizes))[group_B],
        {"right": rewards_BR.sum(-1), "short": eighths(rows)},
    )


batches = st.builds(made, st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 2**32))
quick = settings(deadline=None, max_examples=40)


def close(seen: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(seen, wanted, atol=1e-4, rtol=1e-4)


def shifted(batch: Batch, by_B: Tensor) -> Batch:
    """The batch with more reward on the last sampled token of each row, in every named reward too."""
    rewards_BR = batch.rewards_BR.clone()
    last_B = (batch.mask_BR * torch.arange(R)).argmax(-1)
    rewards_BR[torch.arange(len(by_B)), last_B] += by_B
    return replace(batch, rewards_BR=rewards_BR, named_B={k: v + by_B for k, v in batch.named_B.items()})


@pytest.mark.parametrize("name", SHIFT_FREE)
@quick
@given(batch=batches, seed=st.integers(0, 99))
def test_a_constant_added_to_a_groups_rewards_changes_nothing(name: str, batch: Batch, seed: int) -> None:
    by_G = torch.randint(-3, 4, (int(batch.group_B.max()) + 1,), generator=torch.Generator().manual_seed(seed))
    close(shifted(batch, by_G[batch.group_B].float()).estimate(name)[0], batch.estimate(name)[0])


@quick
@given(batch=batches, by=st.integers(-3, 3))
def test_remax_ignores_what_the_greedy_response_gets_too(batch: Batch, by: int) -> None:
    more = shifted(batch, torch.full((len(batch.mask_BR),), float(by)))
    close(replace(more, greedy_reward_B=batch.greedy_reward_B + by).estimate("remax")[0], batch.estimate("remax")[0])


@pytest.mark.parametrize("name", EVERY)
@quick
@given(batch=batches, seed=st.integers(0, 99))
def test_the_order_of_the_rows_does_not_matter(name: str, batch: Batch, seed: int) -> None:
    order = torch.randperm(len(batch.mask_BR), generator=torch.Generator().manual_seed(seed))
    for seen, wanted in zip(batch.take(order).estimate(name), batch.estimate(name), strict=True):
        close(seen, wanted[order])


@pytest.mark.parametrize("name", EVERY)
@quick
@given(batch=batches, seed=st.integers(0, 99))
def test_masked_tokens_get_nothing_and_change_nothing(name: str, batch: Batch, seed: int) -> None:
    noise_BR = torch.randn(batch.mask_BR.shape, generator=torch.Generator().manual_seed(seed)) * 100
    off_BR = batch.mask_BR == 0
    other = replace(
        batch,
        values_BR=torch.where(off_BR, noise_BR, batch.values_BR),
        old_log_probs_BR=torch.where(off_BR, -noise_BR.abs(), batch.old_log_probs_BR),
        sum_pi_squared_BR=torch.where(off_BR, noise_BR, batch.sum_pi_squared_BR),
    )
    for seen, wanted in zip(other.estimate(name), batch.estimate(name), strict=True):
        assert torch.equal(seen, wanted)
        assert not seen[off_BR].any()


@pytest.mark.parametrize("name", sorted(set(EVERY) - {"gae", "reinforce_plus_plus", "optimal_token_baseline"}))
@quick
@given(batch=batches)
def test_all_sampled_tokens_of_a_response_get_its_advantage(name: str, batch: Batch) -> None:
    for advantage_R, mask_R in zip(batch.estimate(name)[0], batch.mask_BR > 0, strict=True):
        assert advantage_R[mask_R].unique().numel() == 1


@pytest.mark.parametrize("name", EVERY)
@quick
@given(batch=batches)
def test_empty_masks_give_zeros(name: str, batch: Batch) -> None:
    """Of all rows, and of the first row only."""
    nothing = replace(batch, mask_BR=torch.zeros_like(batch.mask_BR))
    for seen in nothing.estimate(name):
        assert torch.equal(seen, torch.zeros_like(seen))
    mask_BR = batch.mask_BR.clone()
    mask_BR[0] = 0
    for seen in replace(batch, mask_BR=mask_BR).estimate(name):
        assert torch.isfinite(seen).all() and not seen[0].any()


@pytest.mark.parametrize("name", EVERY)
@quick
@given(batch=batches)
def test_a_reward_on_a_masked_token_counts_for_the_sampled_one_before(name: str, batch: Batch) -> None:
    """A score stands on the last token, which may be a tool's or have been rejected."""
    padded: dict[str, Any] = {
        k: torch.nn.functional.pad(v, (0, 1)) for k, v in vars(batch).items() if k.endswith("_BR")
    }
    padded["rewards_BR"] = torch.zeros_like(padded["rewards_BR"])
    padded["rewards_BR"][:, -1] = batch.rewards_BR.sum(-1)
    for seen, wanted in zip(replace(batch, **padded).estimate(name), batch.estimate(name), strict=True):
        close(seen[:, :-1], wanted)
        assert not seen[:, -1].any()


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@quick
@given(batch=batches)
def test_a_group_of_one_has_no_advantage(name: str, batch: Batch) -> None:
    alone_B = torch.bincount(batch.group_B)[batch.group_B] == 1
    assert not batch.estimate(name)[0][alone_B].any()


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@quick
@given(batch=batches, value=st.sampled_from([0.0, 0.1, 1 / 3, -2.7]))
def test_a_group_of_equal_rewards_has_no_advantage(name: str, batch: Batch, value: float) -> None:
    """Exactly none, and with a difference below the threshold too."""
    first_B = batch.group_B == 0
    tiny_B = torch.arange(len(first_B)) * 1e-10
    same_B = torch.where(first_B, value + tiny_B, batch.rewards_BR.sum(-1))
    rewards_BR = torch.where(first_B[:, None], 0.0, batch.rewards_BR)
    rewards_BR[first_B, 0] = same_B[first_B]
    named_B = {k: torch.where(first_B, same_B, v) for k, v in batch.named_B.items()}
    seen_BR, _ = replace(batch, rewards_BR=rewards_BR, named_B=named_B).estimate(name)
    assert not seen_BR[first_B].any()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gpg"])
@quick
@given(batch=batches)
def test_the_advantages_of_a_group_sum_to_zero(name: str, batch: Batch) -> None:
    advantages_BR = batch.estimate(name)[0]
    advantage_B = advantages_BR.sum(-1) / batch.mask_BR.sum(-1)
    close(torch.zeros(4).index_add(0, batch.group_B, advantage_B), torch.zeros(4))


@quick
@given(batch=batches)
def test_the_advantages_of_a_groups_tokens_sum_to_zero_for_opo(batch: Batch) -> None:
    advantage_B = batch.estimate("opo")[0].sum(-1)
    close(torch.zeros(4).index_add(0, batch.group_B, advantage_B), torch.zeros(4))


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"])
@quick
@given(batch=st.builds(made, st.just([4, 4]), st.integers(0, 2**32)))
def test_whitened_advantages_have_mean_0_and_variance_1(name: str, batch: Batch) -> None:
    seen = batch.estimate(name)[0][batch.mask_BR > 0]
    rewards_B = batch.named_B["right"]
    if all(rewards_B[batch.group_B == group].unique().numel() > 1 for group in range(2)):  # no group is flat
        assert abs(seen.mean().item()) < 1e-4 and seen.var().item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("name", EVERY)
def test_the_better_of_two_responses_has_the_larger_advantage(name: str) -> None:
    """In each of two groups, one of which does worse as a whole than the other."""
    flat_BR, reward_B = torch.full((4, R), 0.5), torch.tensor([0.25, 0.75, 2.25, 2.75])
    rewards_BR = torch.zeros(4, R)
    rewards_BR[:, -1] = reward_B
    greedy_reward_B = torch.tensor([0.5, 0.5, 2.5, 2.5])
    batch = Batch(
        rewards_BR,
        torch.ones(4, R),
        torch.tensor([0, 0, 1, 1]),
        values_BR=flat_BR,
        old_log_probs_BR=-flat_BR,
        sum_pi_squared_BR=flat_BR,
        greedy_reward_B=greedy_reward_B,
        named_B={"right": reward_B},
    )
    worse_BR, better_BR = batch.estimate(name)[0].view(2, 2, R).unbind(1)
    assert (better_BR > worse_BR).all()
    # With a baseline of its own, a prompt's better response is good, however little the prompt earns.
    assert ((better_BR > 0).all() and (worse_BR <= 0).all()) or name in ("gae", "reinforce_plus_plus")


@quick
@given(batch=batches)
def test_gae_with_lambda_and_gamma_of_one_returns_the_reward_to_go(batch: Batch) -> None:
    gae = ESTIMATORS.resolve("gae").function
    _, returns_BR = gae(batch.rewards_BR, batch.mask_BR, batch.group_B, batch.values_BR, 1.0, 1.0)
    close(returns_BR, batch.rewards_BR.sum(-1, keepdim=True) * batch.mask_BR)
