import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.data.loader import StatefulLoader
from rl_core.errors import InputError


def take(loader: StatefulLoader, batches: int) -> list[list[int]]:
    return [loader.next() for _ in range(batches)]


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 6), st.integers(0, 6), st.integers(0, 3))
def test_restoring_continues_where_it_was(rows: int, batch_size: int, k: int, m: int, seed: int) -> None:
    uninterrupted = take(StatefulLoader(rows, batch_size, seed, "h"), k + m)
    first, second = StatefulLoader(rows, batch_size, seed, "h"), StatefulLoader(rows, batch_size, seed, "h")
    before = take(first, k)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + take(second, m) == uninterrupted


@given(st.integers(1, 9), st.integers(1, 20))
def test_every_epoch_has_every_row_once(rows: int, batch_size: int) -> None:
    order = sum(take(StatefulLoader(rows, batch_size, 0, "h"), rows * 2), [])
    epochs = [order[i : i + rows] for i in range(0, len(order), rows)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)


def test_epochs_and_seeds_differ_in_order() -> None:
    loader = StatefulLoader(50, 50, 1, "h")
    first, second = take(loader, 2)
    assert loader.epoch == 2
    assert first != second
    assert first != StatefulLoader(50, 50, 2, "h").next()


def test_a_batch_size_change_keeps_the_position() -> None:
    small, large = StatefulLoader(10, 3, 0, "h"), StatefulLoader(10, 5, 0, "h")
    take(small, 2)
    large.load_state_dict(small.state_dict())
    assert large.next() == sum(take(StatefulLoader(10, 1, 0, "h"), 11), [])[6:11]


@pytest.mark.parametrize(
    ("changed", "says"), [((11, 2, 0, "h"), "rows"), ((10, 2, 1, "h"), "seed"), ((10, 2, 0, "other"), "data_hash")]
)
def test_a_position_in_other_data_is_refused(changed: tuple[int, int, int, str], says: str) -> None:
    state = StatefulLoader(10, 2, 0, "h").state_dict()
    with pytest.raises(InputError, match=f"{says}="):
        StatefulLoader(*changed).load_state_dict(state)


def test_no_rows_are_refused() -> None:
    with pytest.raises(InputError, match="at least 1"):
        StatefulLoader(0, 1, 0, "h")
