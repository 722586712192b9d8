import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.data import loader as module
from rl_core.data.loader import StatefulLoader
from rl_core.errors import InputError


def take(loader: StatefulLoader, batches: int) -> list[list[int]]:
    return [loader.next() for _ in range(batches)]


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 6), st.integers(0, 6), st.integers(0, 3))
def test_restoring_continues_where_it_was(rows: int, batch_size: int, k: int, m: int, seed: int) -> None:
    uninterrupted = take(StatefulLoader([rows], batch_size, seed, "h"), k + m)
    first, second = StatefulLoader([rows], batch_size, seed, "h"), StatefulLoader([rows], batch_size, seed, "h")
    before = take(first, k)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + take(second, m) == uninterrupted


@given(st.integers(1, 9), st.integers(1, 20))
def test_every_epoch_has_every_row_once(rows: int, batch_size: int) -> None:
    order = [row for batch in take(StatefulLoader([rows], batch_size, 0, "h"), rows * 2) for row in batch]
    epochs = [order[i : i + rows] for i in range(0, len(order), rows)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)


def test_epochs_and_seeds_differ_in_order() -> None:
    loader = StatefulLoader([50], 50, 1, "h")
    first, second = take(loader, 2)
    assert first != second
    assert first != StatefulLoader([50], 50, 2, "h").next()


def test_a_batch_size_change_keeps_the_position() -> None:
    small, large = StatefulLoader([10], 3, 0, "h"), StatefulLoader([10], 5, 0, "h")
    take(small, 2)
    large.load_state_dict(small.state_dict())
    one_by_one = [row for batch in take(StatefulLoader([10], 1, 0, "h"), 11) for row in batch]
    assert large.next() == one_by_one[6:11]


@pytest.mark.parametrize(
    ("changed", "says"),
    [(([11], 2, 0, "h"), "sizes"), (([10], 2, 1, "h"), "seed"), (([10], 2, 0, "other"), "data_hash")],
)
def test_a_position_in_other_data_is_refused(changed: tuple[list[int], int, int, str], says: str) -> None:
    state = StatefulLoader([10], 2, 0, "h").state_dict()
    with pytest.raises(InputError, match=f"{says}="):
        StatefulLoader(*changed).load_state_dict(state)


def test_no_rows_are_refused() -> None:
    with pytest.raises(InputError, match="no rows in source 2 of 3"):
        StatefulLoader([3, 0, 2], 1, 0, "h", [1, 1, 1])


def test_the_order_of_a_single_window_is_the_one_that_runs_began_with() -> None:
    assert take(StatefulLoader([10], 10, 3, "h"), 8)[::7] == [
        [9, 6, 0, 2, 1, 4, 7, 5, 3, 8],
        [3, 4, 2, 6, 1, 9, 7, 0, 8, 5],
    ]


@given(st.integers(1, 30), st.integers(1, 7))
def test_with_several_windows_every_epoch_has_every_row_once(rows: int, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW", window)
        loader = StatefulLoader([rows], rows, 0, "h")
        epochs = take(loader, 4)
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)


def test_windows_are_even_samples_in_an_order_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", 100)
    epochs = take(StatefulLoader([995], 995, 0, "h"), 3)
    begins = []
    for epoch in epochs:
        first = sorted(epoch[: 99 if min(epoch[:99]) >= 5 else 100])
        assert {b - a for a, b in itertools.pairwise(first)} == {10}, "one window: every tenth row"
        assert epoch[:99] != first[:99]
        begins.append(first[0])
    assert len(set(begins)) > 1


def test_memory_is_bounded_by_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", 1000)
    loader = StatefulLoader([10**12], 5, 0, "h")
    monkeypatch.setattr(module.SourceOrder, "_visits", lambda self, epoch: [123])
    assert len(set(loader.next())) == 5


SHARES = st.lists(st.integers(1, 60), min_size=1, max_size=3)


@given(SHARES, st.integers(1, 200))
def test_the_prompts_of_a_mixture_follow_the_weights_within_one(weights: list[int], prompts: int) -> None:
    loader = StatefulLoader([7] * len(weights), 1, 0, "h", weights)
    for k in range(1, prompts + 1):
        loader.next()
        given_ = loader.state_dict()["positions"]
        assert all(abs(w * k / sum(weights) - n) < 1 for w, n in zip(weights, given_, strict=True))


def test_ties_go_to_the_first_and_weights_need_not_be_whole() -> None:
    def sources(weights: list[float], prompts: int) -> list[int]:
        return [row // 10 for row in StatefulLoader([10] * len(weights), prompts, 0, "h", weights).next()]

    assert sources([1.0, 1.0, 1.0], 7) == [0, 1, 2, 0, 1, 2, 0]
    assert sources([0.1, 0.1, 0.1], 300).count(1) == 100 and sources([0.1, 0.1, 0.1], 7) == sources([3, 3, 3], 7)
    assert sources([2.0, 1.0], 6) == [0, 1, 0, 0, 1, 0]


def test_each_source_has_epochs_and_an_order_of_its_own() -> None:
    loader = StatefulLoader([5, 50, 50], 300, 0, "h", [1, 1, 1])
    prompts = loader.next()
    small, middle, large = [row for row in prompts if row < 5], prompts[1::3], prompts[2::3]
    assert sorted(small) == sorted([*range(5)] * 20) and small[:5] != small[5:10]
    assert sorted(middle) == sorted([*range(5, 55)] * 2) and sorted(large) == sorted([*range(55, 105)] * 2)
    assert [row - 5 for row in middle] != [row - 55 for row in large]
    assert small == take(StatefulLoader([5], 100, 0, "h"), 1)[0], "the first source's order is that of one alone"


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(1, 7), st.integers(0, 6), st.integers(0, 6))
def test_a_mixture_continues_where_it_was(sizes: list[int], batch_size: int, k: int, m: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW", 3)
        weights = [0.5 + size for size in sizes]
        whole, first, second = (StatefulLoader(sizes, batch_size, 4, "h", weights) for _ in range(3))
        uninterrupted, before = take(whole, k + m), take(first, k)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert before + take(second, m) == uninterrupted


def test_a_position_in_another_mixture_is_refused() -> None:
    state = StatefulLoader([4, 6], 2, 0, "h", [1, 2]).state_dict()
    with pytest.raises(InputError, match=r"weights=\[1, 1\] \(the weights of data.mixture changed\)"):
        StatefulLoader([4, 6], 2, 0, "h", [1, 1]).load_state_dict(state)
    with pytest.raises(InputError, match=r"sizes=\[10\]"):
        StatefulLoader([10], 2, 0, "h").load_state_dict(state)
