import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.cluster.dispatch import Dispatch, Layout, collect, register, split
from rl_core.data.protocol import DataProto


def rows(count: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(count)}, {"name": [f"row {i}" for i in range(count)]})


def test_one_to_all_sends_the_same_and_collects_a_list() -> None:
    assert split(Dispatch.ONE_TO_ALL, Layout(3), ("a", 1)) == ([("a", 1)] * 3, 0)
    assert split(Dispatch.ONE_TO_ALL, Layout(2), ()) == ([(), ()], 0)
    assert collect(Dispatch.ONE_TO_ALL, [1, 2, 3], 0) == [1, 2, 3]


def test_rank_zero_is_called_alone() -> None:
    assert split(Dispatch.RANK_ZERO, Layout(3), ("a", 1)) == ([("a", 1)], 0)
    assert collect(Dispatch.RANK_ZERO, ["result"], 0) == "result"


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 6))
def test_a_batch_is_computed_in_shares_and_joined_in_order(count: int, world_size: int) -> None:
    data = rows(count)
    calls, padding = split(Dispatch.DP_COMPUTE_PROTO, Layout(world_size), (data, 0.5))
    assert len(calls) == world_size and padding == -count % world_size
    assert {len(share) for share, _ in calls} == {-(-count // world_size)}
    assert {extra for _, extra in calls} == {0.5}
    results = [DataProto({"y": share.batch["x"] * 2}, {"n": share.non_tensor_batch["name"]}) for share, _ in calls]
    joined = collect(Dispatch.DP_COMPUTE_PROTO, results, padding)
    assert joined.batch["y"].tolist() == [2 * i for i in range(count)]
    assert joined.non_tensor_batch["n"].tolist() == data.non_tensor_batch["name"].tolist()


def test_two_batches_are_split_alike() -> None:
    calls, padding = split(Dispatch.DP_COMPUTE_PROTO, Layout(2), (rows(3), rows(3)))
    assert padding == 1
    assert [[part.batch["x"].tolist() for part in call] for call in calls] == [[[0, 1]] * 2, [[2, 0]] * 2]


def test_a_metric_needs_a_batch_that_divides_and_comes_from_one_rank() -> None:
    calls, padding = split(Dispatch.DP_COMPUTE_METRIC, Layout(2), (rows(4), "mode"))
    assert [(share.batch["x"].tolist(), extra) for share, extra in calls] == [([0, 1], "mode"), ([2, 3], "mode")]
    assert padding == 0
    with pytest.raises(ValueError, match="3 rows do not divide"):  # padding would count rows twice
        split(Dispatch.DP_COMPUTE_METRIC, Layout(2), (rows(3),))
    assert collect(Dispatch.DP_COMPUTE_METRIC, [{"loss": 1.0}, {"loss": 1.0}], 0) == {"loss": 1.0}


def test_an_update_gives_rows_of_all_groups_and_metrics_of_one() -> None:
    layout = Layout(4, 2)
    calls, padding = split(Dispatch.DP_UPDATE, layout, (rows(4),))
    assert [share.batch["x"].tolist() for (share,) in calls] == [[0, 1], [0, 1], [2, 3], [2, 3]] and padding == 0
    assert list(layout.answering(Dispatch.DP_UPDATE)) == [0, 2]
    with pytest.raises(ValueError, match="3 rows do not divide"):
        split(Dispatch.DP_UPDATE, layout, (rows(3),))
    joined, metrics = collect(Dispatch.DP_UPDATE, [(rows(2), {"loss": 1.0}), (rows(2), {"loss": 1.0})], 0)
    assert joined.batch["x"].tolist() == [0, 1, 0, 1] and metrics == {"loss": 1.0}
    assert not collect(Dispatch.DP_UPDATE, [(DataProto(), {})] * 2, 0)[0]


ROLLOUT, PROTO, METRIC = Dispatch.ROLLOUT_COMPUTE_PROTO, Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_METRIC


def test_ranks_of_a_sequence_parallel_group_get_the_same_part() -> None:
    layout = Layout(6, 3)
    calls, padding = split(PROTO, layout, (rows(3), 0.5))
    assert padding == 1 and {extra for _, extra in calls} == {0.5}
    assert [share.batch["x"].tolist() for share, _ in calls] == [[0, 1]] * 3 + [[2, 0]] * 3
    assert all(calls[rank][0] is calls[rank // 3 * 3][0] for rank in range(6)), "one object, to be put once"
    assert list(layout.answering(PROTO)) == [0, 3]
    calls, _ = split(METRIC, layout, (rows(4),))
    assert [share.batch["x"].tolist() for (share,) in calls] == [[0, 1]] * 3 + [[2, 3]] * 3
    assert list(layout.answering(METRIC)) == [0]
    with pytest.raises(ValueError, match="3 rows do not divide into 2"):
        split(METRIC, layout, (rows(3),))


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 3))
def test_rollouts_are_split_over_all_ranks(count: int, groups: int, sharing: int) -> None:
    layout, world_size = Layout(groups * sharing, sharing), groups * sharing
    calls, padding = split(ROLLOUT, layout, (rows(count),))
    assert padding == -count % world_size and {len(share) for (share,) in calls} == {-(-count // world_size)}
    joined = collect(ROLLOUT, [calls[rank][0] for rank in layout.answering(ROLLOUT)], padding)
    assert joined.batch["x"].tolist() == list(range(count))


def test_all_ranks_run_and_answer_what_is_for_all() -> None:
    layout = Layout(4, 2)
    for mode in (Dispatch.ONE_TO_ALL, ROLLOUT):
        assert list(layout.called(mode)) == list(layout.answering(mode)) == [0, 1, 2, 3]
    assert list(layout.called(Dispatch.RANK_ZERO)) == list(layout.answering(Dispatch.RANK_ZERO)) == [0]
    assert split(Dispatch.ONE_TO_ALL, layout, ("a",)) == ([("a",)] * 4, 0)


def test_register_marks_a_method() -> None:
    class Worker:
        @register(Dispatch.RANK_ZERO)
        def method(self) -> str:
            return "done"

    assert Worker.method.dispatch_mode is Dispatch.RANK_ZERO  # type: ignore[attr-defined]
    assert Worker().method() == "done"
