import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.data.protocol import DataProto


def make(rows: int, width: int = 3) -> DataProto:
    return DataProto.from_dict(
        {"ids": torch.arange(rows * width).reshape(rows, width), "score": torch.arange(rows).float()},
        {"text": [f"row {i}" for i in range(rows)], "messages": [[i, i] for i in range(rows)], "n": np.arange(rows)},
    )


def same(a: DataProto, b: DataProto) -> bool:
    return (
        a.batch.keys() == b.batch.keys()
        and a.non_tensor_batch.keys() == b.non_tensor_batch.keys()
        and all(torch.equal(a.batch[name], b.batch[name]) for name in a.batch)
        and all((a.non_tensor_batch[name] == b.non_tensor_batch[name]).all() for name in a.non_tensor_batch)
    )


def texts(data: DataProto) -> list[str]:
    return list(data.non_tensor_batch["text"])


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 5))
def test_concat_undoes_chunk(k: int, size: int) -> None:
    data = make(k * size)
    parts = data.chunk(k)
    assert [len(part) for part in parts] == [size] * k
    assert same(DataProto.concat(parts), data)


def test_concat_pads_to_the_widest_part() -> None:
    """Prompts of one rank or one rollout may be longer than those of another."""
    narrow, wide = (DataProto({"ids": torch.ones(2, width), "n": torch.tensor([width] * 2)}) for width in (2, 3))
    whole = DataProto.concat([narrow, wide])
    assert whole.batch["ids"].tolist() == [[1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]]
    assert whole.batch["n"].tolist() == [2, 2, 3, 3]
    assert DataProto.concat([wide, narrow]).batch["ids"].shape == (4, 3)


@settings(deadline=None)
@given(st.permutations(range(7)))
def test_reorder_by_the_inverse_undoes_reorder(order: list[int]) -> None:
    data = make(7)
    shuffled = data.reorder(order)
    assert texts(shuffled) == [f"row {i}" for i in order]
    assert same(shuffled.reorder(np.argsort(order).tolist()), data)


@settings(deadline=None)
@given(st.integers(0, 9), st.integers(1, 12))
def test_unpad_undoes_pad(rows: int, k: int) -> None:
    data = make(rows)
    padded, added = data.pad_to_divisor(k)
    assert len(padded) % k == 0 and len(padded) == rows + added < rows + k
    assert texts(padded)[rows:] == [f"row {i % rows}" for i in range(added)]  # from the start, over and over
    assert same(padded.unpad(added), data)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, -1), [3, 2, 1, 0]),
        ([2, 0, 2], [2, 0, 2]),
        ([], []),
        (torch.tensor([3, -1]), [3, 3]),
        (np.array([1]), [1]),
        ([True, False, False, True], [0, 3]),
        (torch.tensor([False, True, False, False]), [1]),
    ],
)
def test_rows_are_taken_by_slice_indices_or_mask(rows: object, expected: list[int]) -> None:
    taken = make(4)[rows]  # type: ignore[index]
    assert taken.batch["score"].tolist() == expected
    assert texts(taken) == [f"row {i}" for i in expected]


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(IndexError, match="3 entries"):
        make(4)[[True, False, True]]


def test_repeat_keeps_the_copies_of_a_row_together() -> None:
    assert make(2).repeat(2).batch["score"].tolist() == [0, 0, 1, 1]


def test_lists_of_equal_length_stay_one_entry_per_row() -> None:
    assert make(3).non_tensor_batch["messages"].shape == (3,)


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="'a': 2"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"b": [1, 2, 3]})
    with pytest.raises(ValueError, match="both batch and non_tensor_batch"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"a": [1, 2]})


def test_union_joins_columns_and_names_a_conflict() -> None:
    data, more = make(3), DataProto.from_dict({"values": torch.ones(3)})
    joined = data.union(more)
    assert set(joined.batch) == {"ids", "score", "values"}
    with pytest.raises(ValueError, match="'score'"):
        data.union(DataProto.from_dict({"score": torch.zeros(3)}))
    with pytest.raises(ValueError, match="'text'"):
        data.union(DataProto.from_dict({}, {"text": ["row 0", "row 1", "other"]}))
    with pytest.raises(ValueError, match="3 and 2 rows"):
        data.union(DataProto.from_dict({"values": torch.ones(2)}))


def test_union_of_identical_columns_is_fine_even_with_nan_and_nested_arrays() -> None:
    def data() -> DataProto:
        return DataProto.from_dict(
            {"score": torch.tensor([1.0, float("nan")])},
            {"extra": [{"a": np.arange(2), "b": float("nan")}, None]},
        )

    assert len(data().union(data())) == 2


def test_select_keeps_and_pop_removes() -> None:
    data = make(2)
    assert set(data.select(["ids", "text"])._columns()) == {"ids", "text"}
    popped = data.pop(["ids", "text"])
    assert set(popped._columns()) == {"ids", "text"} and len(popped) == 2
    assert set(data._columns()) == {"score", "messages", "n"}
    with pytest.raises(ValueError, match="'absent'"):
        data.select(["absent"])
    with pytest.raises(ValueError, match="'ids'"):
        data.pop(["ids"])


def test_unequal_chunks_and_unequal_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="5 rows"):
        make(5).chunk(2)
    with pytest.raises(ValueError, match="columns differ"):
        DataProto.concat([make(2), make(2).select(["ids"])])
    with pytest.raises(ValueError, match="no parts"):
        DataProto.concat([])
    with pytest.raises(ValueError, match="permutation"):
        make(3).reorder([0, 0, 1])


def test_a_chunk_is_sent_without_the_rest_of_its_batch() -> None:
    data = DataProto.from_dict({"ids": torch.zeros(1000, 100)}, {"text": ["x"] * 1000})
    whole, part = len(pickle.dumps(data)), len(pickle.dumps(data.chunk(100)[0]))
    assert part < whole / 50


def test_a_pickled_batch_comes_back_whole() -> None:
    data = make(4)
    assert same(pickle.loads(pickle.dumps(data[1:3])), data[1:3])
    needs_grad = DataProto({"loss": torch.ones(2, requires_grad=True) * 2})
    assert pickle.loads(pickle.dumps(needs_grad)).batch["loss"].tolist() == [2, 2]
