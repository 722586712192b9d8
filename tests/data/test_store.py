import itertools
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.data import store as module
from rl_core.data.rows import Row, make_row
from rl_core.data.store import RowWriter, StoredRows, data_hash, part_name
from rl_core.errors import InputError
from rl_core.storage.store import Store

TEXT = st.text(st.characters())  # lone surrogates too
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["data_source", "prompt", "ability", "reward_model", "extra_info", "more", "own"])
NUMBER = itertools.count()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_ROWS", 12)
    monkeypatch.setattr(module, "GROUP_ROWS", 5)


def rows_of(count: int) -> list[Row]:
    return [make_row("exact", f"question {i}", "math", str(i), str(i), "train", i) for i in range(count)]


def written(store: Store, rows: list[Row], split: str = "train") -> str:
    writer = RowWriter(store, split)
    for row in rows:
        writer.add(row, len(str(row)))
    return writer.close()


def same(a: Any, b: Any) -> bool:
    """Equal with equal types and orders of keys, which == does not look at."""
    return repr(a) == repr(b)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.dictionaries(NAMES, JSON, max_size=6), min_size=1, max_size=5))
def test_every_row_comes_back_exactly_as_it_was_written(rows: list[Row]) -> None:
    store = Store(f"memory://rows-{next(NUMBER)}")
    written(store, rows)
    back = StoredRows(store, "train")
    assert len(back) == len(rows) and back[:] == rows
    assert all(same(a[name], b[name]) for a, b in zip(back[:], rows, strict=True) for name in b)


@pytest.mark.parametrize("count", [1, 5, 11, 12, 13, 24, 40])
def test_rows_lie_in_parts_of_groups_and_are_found_by_number(tmp_path: Path, small_parts: None, count: int) -> None:
    store, rows = Store(str(tmp_path)), rows_of(count)
    written(store, rows)
    assert store.listdir("data/train") == [f"part_{part:05d}.parquet" for part in range(-(-count // 12))]
    first = pq.ParquetFile(tmp_path / part_name("train", 0))
    assert [first.metadata.row_group(g).num_rows for g in range(first.num_row_groups)][:-1] == [5] * (
        (min(count, 12) - 1) // 5
    )
    assert first.read(["prompt_tokens"])["prompt_tokens"][0].as_py() == len(str(rows[0]))
    back = StoredRows(store, "train")
    assert [back[i] for i in reversed(range(count))] == rows[::-1] and back[-1] == rows[-1] and list(back) == rows
    with pytest.raises(IndexError):
        back[count]


def test_no_more_than_a_few_parts_and_groups_are_kept(
    tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PARTS_OPEN", 2)
    monkeypatch.setattr(module, "GROUPS_KEPT", 3)
    store = Store(str(tmp_path))
    written(store, rows_of(60))
    back = StoredRows(store, "train")
    reads: list[str] = []
    real = Store.open

    def counted(self: Store, rel: str) -> Any:
        reads.append(rel)
        return real(self, rel)

    monkeypatch.setattr(Store, "open", counted)
    for _ in range(2):
        assert [row["extra_info"]["index"] for row in back] == list(range(60))
    assert len(reads) == 10 - 1, "each part is opened once a pass; the last one was open at first"
    assert back._open.cache_info().currsize == 2 and back._group.cache_info().currsize == 3


def test_the_hash_is_of_the_rows_not_of_the_files(
    tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(30)
    first = written(Store(str(tmp_path / "a")), rows)
    monkeypatch.setattr(module, "PART_ROWS", 7)
    assert written(Store(str(tmp_path / "b")), [dict(reversed(row.items())) for row in rows]) == first
    assert written(Store(str(tmp_path / "c")), rows[::-1]) != first
    assert written(Store(str(tmp_path / "d")), rows[:-1]) != first
    other = written(Store(str(tmp_path / "e")), rows[:-1])
    assert data_hash([first, other]) != data_hash([other, first]) != data_hash([other, other])


def test_parts_of_an_attempt_that_did_not_end_are_gone(tmp_path: Path, small_parts: None) -> None:
    store = Store(str(tmp_path))
    written(store, rows_of(30))
    written(store, rows_of(3))
    assert store.listdir("data/train") == ["part_00000.parquet"] and len(StoredRows(store, "train")) == 3


@pytest.mark.parametrize("place", [100, -5, None], ids=["in a group", "at the end", "cut short"])
def test_a_damaged_part_is_named(tmp_path: Path, small_parts: None, place: int | None) -> None:
    store = Store(str(tmp_path))
    written(store, rows_of(30))
    file = tmp_path / part_name("train", 1)
    data = bytearray(file.read_bytes())
    if place is None:
        del data[len(data) // 2 :]
    else:
        data[place] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match="data/train/part_00001.parquet in "):
        list(StoredRows(store, "train"))


def test_missing_parts_are_named(tmp_path: Path, small_parts: None) -> None:
    store = Store(str(tmp_path))
    with pytest.raises(InputError, match="prepared train rows"):
        StoredRows(store, "train")
    written(store, rows_of(40))
    store.remove(part_name("train", 1))
    with pytest.raises(InputError, match="no file data/train/part_00001"):
        StoredRows(store, "train")


def test_a_value_that_json_lacks_is_refused(tmp_path: Path) -> None:
    writer = RowWriter(Store(str(tmp_path)), "val")
    writer.add(rows_of(1)[0], 1)
    with pytest.raises(InputError, match="bytes is not JSON") as error:
        writer.add({"prompt": [], "own": {"picture": b"x"}}, 1)
    assert error.value.where == "val row 2"


def test_rows_of_a_remote_store_are_read_by_range(small_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    store, rows = Store("memory://ranges"), rows_of(30)
    written(store, rows)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *_, **__: pytest.fail("a whole part was read"))
    back = StoredRows(store, "train")
    assert back[17] == rows[17]
