import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ALONE, WIDTH, rows_of

from rl_core.errors import InputError
from rl_core.training.packing import MicroBatch, micro_batches, split_by_tokens

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@settings(deadline=None)
@given(LENGTHS, st.integers(50, 300))
def test_groups_stay_within_the_token_budget(lengths: list[int], max_tokens: int) -> None:
    groups = split_by_tokens(lengths, max_tokens)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert all(group and sum(lengths[i] for i in group) <= max_tokens for group in groups)
    # Groups that are this full mean that hardly fewer would do.
    assert len(groups) <= 2 * sum(lengths) / max_tokens + 1


def test_a_row_above_the_budget_is_refused() -> None:
    assert split_by_tokens([10, 3], 10) == [[0], [1]]
    with pytest.raises(InputError) as raised:
        split_by_tokens([3, 11], 10)
    assert "at most 10 tokens" in raised.value.expected and "11 tokens" in raised.value.seen
    assert raised.value.where == "actor.max_tokens_per_micro_batch"
    assert "actor.max_tokens_per_micro_batch=11" in raised.value.fix


@settings(deadline=None)
@given(LENGTHS, st.integers(50, 300), st.data())
def test_more_groups_for_the_other_ranks_sake_stay_within_the_budget(
    lengths: list[int], max_tokens: int, data: st.DataObject
) -> None:
    own = len(split_by_tokens(lengths, max_tokens))
    wanted = data.draw(st.integers(own, len(lengths)))

    def another_rank(agreed: torch.Tensor, **_: object) -> None:
        agreed.copy_(torch.maximum(agreed, torch.tensor([wanted, 1])))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_backend", lambda: "gloo")
        patch.setattr(dist, "all_reduce", another_rank)
        groups = split_by_tokens(lengths, max_tokens)
    assert len(groups) == wanted and all(groups)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in group) for group in groups]
    assert loads == sorted(loads, reverse=True) and loads[0] <= max_tokens


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, WIDTH)), min_size=1, max_size=6))
def test_padding_undoes_packing(lengths: list[tuple[int, int]]) -> None:
    rows = rows_of(lengths)
    micro = MicroBatch(rows, ALONE)
    packed = micro.packed
    prompts = [row[:p].tolist() for row, (p, _) in zip(rows.batch["prompts"], lengths, strict=True)]
    once = sum(map(len, {tuple(prompt) for prompt in prompts})) + sum(r for _, r in lengths)
    assert packed.input_ids.shape == packed.position_ids.shape == (1, once), "an equal prompt is in the row once"
    place_T = packed.layout.in_row(torch.arange(sum(p + r for p, r in lengths)))
    ids_T, position_T = packed.input_ids[0, place_T], packed.position_ids[0, place_T]
    assert position_T.tolist() == [i for p, r in lengths for i in range(p + r)]
    # The targets are the response tokens, and come back at their places with zeros behind them.
    assert torch.equal(micro.pad(ids_T[micro.target_N]), rows.batch["responses"])
    ones_BR = micro.pad(torch.ones(len(micro.target_N)))
    assert ones_BR.sum(-1).tolist() == [r for _, r in lengths]
    assert [ids_T[s : s + p].tolist() for s, (p, _) in zip(_starts(lengths), lengths, strict=True)] == prompts


def _starts(lengths: list[tuple[int, int]]) -> list[int]:
    return [sum(p + r for p, r in lengths[:i]) for i in range(len(lengths))]


def test_micro_batches_name_their_rows() -> None:
    lengths = [(9, 8), (2, 1), (4, 4), (3, 3)]
    rows = rows_of(lengths)
    found = list(micro_batches(rows, 17, ALONE))
    assert len(found) == 2
    for indices, micro in found:
        assert torch.equal(micro.rows.batch["noise"], rows.batch["noise"][indices])
        assert micro.packed.input_ids.shape[1] == sum(sum(lengths[i]) for i in indices) <= 17
