"""The rows of a split in the run's folder: written sequentially and read in any order, in bounded memory.

A split is a folder of parquet files with small row groups. Columns hold JSON strings: typed columns would give all
rows of a file the same keys and types, unlike those they were written with.
"""

import fnmatch
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import pyarrow as pa
import pyarrow.parquet as pq

from rl_core.data.rows import Row, canonical
from rl_core.errors import InputError
from rl_core.runtime.guardian import staging
from rl_core.storage import run_files
from rl_core.storage.filesystem import storage_errors
from rl_core.storage.manifest import Json
from rl_core.storage.store import Store

PART_ROWS = 1 << 16
"""Rows per part. The list of a part's row groups is parsed when the part is opened, so larger parts open slower."""
GROUP_ROWS = 256
"""Rows per row group, the unit of reading."""
PARTS_OPEN, GROUPS_KEPT = 8, 64

KNOWN = ("data_source", "prompt", "ability", "reward_model", "extra_info")
SCHEMA = pa.schema([*((name, pa.string()) for name in (*KNOWN, "more")), ("prompt_tokens", pa.int32())])


def part_name(split: str, number: int) -> str:
    """Path of a part of a split in the store: `data/train/part_00000.parquet`."""
    return run_files.rows_part(split, number)


def part_writer(file: Path) -> pq.ParquetWriter:
    """A parquet writer for a part, with SCHEMA and the options common to all parts."""
    # Rows are never searched by value, and statistics and dictionaries would dominate the size of small groups.
    options = {"write_statistics": False, "use_dictionary": False, "write_page_checksum": True}
    return pq.ParquetWriter(file, SCHEMA, compression="zstd", **options)


def data_hash(digests: Sequence[str]) -> str:
    """SHA-256 (hexadecimal) of several splits, from the digests of their writers."""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


class RowWriter:
    """Writes the rows of a split; they are valid once the folder `data` is committed."""

    def __init__(self, store: Store, split: str) -> None:
        self.store, self.split = store, split
        store.remove(run_files.rows(split))  # parts left by an interrupted attempt
        self.files: list[Json] = []
        """Manifest entries of the written parts, for `Store.commit_folder`."""
        self._digest = hashlib.sha256()
        self._group: list[dict[str, Any]] = []
        self._rows = 0
        self._folder = staging()
        self._file = Path(self._folder.name, "part.parquet")
        self._part: pq.ParquetWriter | None = None

    def add(self, row: Row, prompt_tokens: int) -> None:
        """Appends a row; raises InputError if it has values that JSON cannot represent."""
        try:
            self._digest.update(canonical(row).encode() + b"\n")
            self._group.append(_to_texts(row) | {"prompt_tokens": prompt_tokens})
        except (TypeError, ValueError) as error:
            raise InputError(
                expected="JSON values: strings, numbers, true, false, null, lists and objects",
                seen=str(error),
                where=f"{self.split} row {self._rows + 1}",
                fix="write dates and bytes as strings, or remove the column",
            ) from error
        self._rows += 1
        if len(self._group) == GROUP_ROWS:
            self._write_group()
        if self._rows % PART_ROWS == 0:
            self._end_part()

    def close(self) -> str:
        """Writes the remaining rows; returns the SHA-256 (hexadecimal) of all rows."""
        self._end_part()
        self._folder.cleanup()
        return self._digest.hexdigest()

    def _write_group(self) -> None:
        with storage_errors(str(self._file), writing=True):
            self._part = self._part or part_writer(self._file)
            self._part.write_table(pa.Table.from_pylist(self._group, SCHEMA))
        self._group = []

    def _end_part(self) -> None:
        if self._group:
            self._write_group()
        if self._part is not None:
            self._part.close()
            name = part_name(self.split, (self._rows - 1) // PART_ROWS)
            self.files.append(self.store.put_file(self._file, run_files.DATA, name.removeprefix(f"{run_files.DATA}/")))
            self._part = None


class StoredRows(Sequence[Row]):
    """The rows written by a RowWriter, unchanged; reading a row reads its row group.

    Raises InputError if a part is missing, and on access if it is damaged.
    """

    def __init__(self, store: Store, split: str) -> None:
        self.store, self.split = store, split
        self._open = lru_cache(PARTS_OPEN)(self._open_part)
        self._group = lru_cache(GROUPS_KEPT)(self._read_group)
        names = fnmatch.filter(store.listdir(run_files.rows(split)), "part_*.parquet")
        parts = [part_name(split, number) for number in range(max(1, len(names)))]
        for part in parts:
            if part.rpartition("/")[2] not in names:
                fix = "restore the file, or start a new run with --new"
                raise InputError(f"prepared {split} rows", f"no file {part}", store.url, fix)
        first, last = self._open(0).metadata, self._open(len(parts) - 1).metadata
        self._part_rows, self._group_rows = first.num_rows, first.row_group(0).num_rows
        self._rows: int = (len(parts) - 1) * self._part_rows + last.num_rows

    def __len__(self) -> int:
        return self._rows

    @overload
    def __getitem__(self, i: int) -> Row: ...
    @overload
    def __getitem__(self, i: slice) -> list[Row]: ...
    def __getitem__(self, i: int | slice) -> Row | list[Row]:
        if isinstance(i, slice):
            return [self[row] for row in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        part, row = divmod(i % len(self), self._part_rows)
        group, offset = divmod(row, self._group_rows)
        return _from_texts(self._group(part, group).slice(offset, 1).to_pylist()[0])

    def _open_part(self, part: int) -> pq.ParquetFile:
        with self._damage_named(part):
            # A group's columns are fetched together; on a local disk that only costs threads.
            return pq.ParquetFile(
                self.store.open(part_name(self.split, part)),
                pre_buffer=not self.store.is_local,
                page_checksum_verification=True,
            )

    def _read_group(self, part: int, group: int) -> pa.Table:
        file = self._open(part)
        with self._damage_named(part):
            return file.read_row_group(group, [*KNOWN, "more"], use_threads=False)

    @contextmanager
    def _damage_named(self, part: int) -> Iterator[None]:
        name = part_name(self.split, part)
        with storage_errors(name):
            try:
                yield
            except (pa.ArrowException, OSError) as error:
                # Arrow raises plain OSErrors without errno; those of the system and of clients are more specific.
                arrow = isinstance(error, pa.ArrowException) or (type(error) is OSError and error.errno is None)
                if not (arrow or isinstance(error, FileNotFoundError)):
                    raise
                raise InputError(
                    expected="the rows as they were written",
                    seen=str(error).splitlines()[0],
                    where=f"{name} in {self.store.url}",
                    fix="restore the file, or start a new run with --new",
                ) from error


def _to_texts(row: Row) -> dict[str, str]:
    texts = {name: json.dumps(row[name]) for name in KNOWN if name in row}
    more = {name: value for name, value in row.items() if name not in KNOWN}
    return texts | ({"more": json.dumps(more)} if more else {})


def _from_texts(texts: dict[str, str | None]) -> Row:
    more = texts.pop("more")
    row = {name: json.loads(text) for name, text in texts.items() if text is not None}
    return row | json.loads(more) if more else row
