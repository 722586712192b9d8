"""Data files: resolution of paths, reading of records, and detection of changed files."""

import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from rl_core.data.json_columns import json_value
from rl_core.data.rows import Found
from rl_core.errors import InputError
from rl_core.storage.filesystem import storage_errors
from rl_core.storage.store import Store

Paths = str | tuple[str, ...]
CheckColumns = Callable[[Collection[str], str], None]
"""Called with a file's columns and URL; raises InputError if required columns are missing."""

BATCH_ROWS = 256
"""Rows per batch read from a columnar file."""
READ_AHEAD = 1 << 20
"""Bytes per read; in columnar files, per column."""
MAX_LINE = 16 << 20
"""Bytes of a JSON line, decompressed; a parsed value takes a multiple of that."""
_KINDS = {
    ".parquet": "parquet",
    **dict.fromkeys((".jsonl", ".json", ".jsonl.gz", ".json.gz"), "JSON lines"),
    **dict.fromkeys((".arrow", ".feather"), "Arrow"),
}
_DATA_FILES = f"files ending in {', '.join(_KINDS)}"
_NO_DATA = {"dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"}
"""Metadata files that the package `datasets` writes next to its data."""
_ETAGS = ("ETag", "etag", "md5Hash")


@dataclass(frozen=True)
class _File:
    """A data file; its name is relative to the folder it was found in."""

    name: str
    url: str
    fs: AbstractFileSystem
    path: str
    info: dict[str, Any]

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)


def read_records(
    path: Paths, columns: Collection[str] | None, check_columns: CheckColumns | None = None
) -> Iterator[tuple[Found, str]]:
    """Records of all files in order, each with its location; an invalid line is returned as an InputError.

    Only `columns` present in a file are read (None: all). Memory is bounded by a batch of rows, for Arrow files by one
    record batch. Raises InputError if a file is missing, damaged or of an unknown format, if `check_columns` rejects
    the columns of a columnar file, or if there is no record at all; TransientError if the storage fails.
    """
    return _records(_found(path), columns, check_columns)


def file_identity(path: Paths) -> dict[str, str]:
    """Identity of each file by name: `size:mtime_ns:sha256`, or `size:ETag` for remote files."""
    return {file.name: _mark(file) for file in _found(path)}


def changed_files(recorded: dict[str, str], path: Paths) -> list[str]:
    """Changes since `file_identity` returned `recorded`, one sentence per file; a mere copy is not a change."""
    now = {file.name: file for found in _matched(path).values() for file in found}
    changes = []
    for name in sorted(recorded.keys() | now.keys(), key=_natural):
        if name not in recorded:
            changes.append(f"new file {name}")
        elif name not in now:
            changes.append(f"{name} is gone")
        elif change := _change(recorded[name], now[name]):
            changes.append(f"{name}: {change}")
    return changes


def _found(path: Paths) -> list[_File]:
    matched = _matched(path)
    for one, files in matched.items():
        if not files:
            fix = "use the path or URL of an existing file, of a folder with such files, or a pattern that matches some"
            raise InputError(_DATA_FILES, "no such file, or a folder without such files", one, fix)
    return list({file.url: file for files in matched.values() for file in files}.values())


def _matched(path: Paths) -> dict[str, list[_File]]:
    """Data files of each path; with several paths, files are named by their full URLs."""
    if isinstance(path, str):
        return {path: _matched_by(path)}
    if len(path) == 1:
        return _matched(path[0])
    return {one: [replace(file, name=file.url) for file in _matched_by(one)] for one in path}


def _matched_by(path: str) -> list[_File]:
    try:
        store = Store(path)
    except InputError as error:
        raise InputError("a path, or a URL of an installed file system", error.seen, path, error.fix) from error
    fs, root = store.fs, store.root
    with _reading(path, "data"):
        try:
            there = {root: fs.info(root)}
            before = root
        except FileNotFoundError:
            there = fs.glob(root, detail=True) if glob.has_magic(root) else {}
            before = re.split(r"[*?[]", root)[0]
        folders = [name for name, info in there.items() if info["type"] == "directory"]
        files = {name: info for name, info in there.items() if name not in folders and _kind(name)}
        for folder in folders:
            inside = fs.find(folder, detail=True)
            files |= {name: info for name, info in inside.items() if _is_data(name[len(folder) :].lstrip("/"))}
    if root in there and not folders and not files:
        raise InputError(_DATA_FILES, "a file of another format", path, "convert it, for example with pandas")
    base = root if root in folders else before.rpartition("/")[0]
    found = [
        _File(name[len(base) :].lstrip("/"), name if store.is_local else fs.unstrip_protocol(name), fs, name, info)
        for name, info in files.items()
    ]
    return sorted(found, key=lambda file: _natural(file.name))


def _is_data(name: str) -> bool:
    """Whether a file in a folder is one of its data files, and not hidden."""
    parts = name.split("/")
    hidden = any(part.startswith((".", "_")) for part in parts)
    return _kind(name) is not None and parts[-1] not in _NO_DATA and not hidden


def _kind(name: str) -> str | None:
    return next((kind for ending, kind in _KINDS.items() if name.lower().endswith(ending)), None)


def _natural(name: str) -> list[Any]:
    return [int(part) if odd % 2 else part for odd, part in enumerate(re.split(r"(\d+)", name))]


def _records(
    files: list[_File], columns: Collection[str] | None, check_columns: CheckColumns | None
) -> Iterator[tuple[Found, str]]:
    any_record = False
    for file in files:
        for number, record in enumerate(_read(file, columns, check_columns), start=1):
            any_record = True
            yield record, f"{file.url}, row {number}"
    if not any_record:
        where = files[0].url + (f" and {len(files) - 1} more" if len(files) > 1 else "")
        raise InputError("at least one row", "an empty file", where, "add rows to it or use another file")


def _read(file: _File, columns: Collection[str] | None, check_columns: CheckColumns | None) -> Iterator[Found]:
    kind = _kind(file.path) or ""
    with _reading(file.url, kind), _opened(file) as opened:
        if kind == "JSON lines":
            yield from _json_lines(opened, file.url, columns)
            return
        names, batches = _parquet(opened, columns) if kind == "parquet" else _arrow(_buffered(opened), columns)
        if check_columns:
            check_columns(names, file.url)
        before = 0
        for batch in batches:
            as_json = all(_is_json(kind) for kind in batch.schema.types)
            for start in range(0, batch.num_rows, BATCH_ROWS):
                rows = batch.slice(start, BATCH_ROWS).to_pylist(maps_as_pydicts="lossy")
                number = before + start + 1
                yield from rows if as_json else (_json_row(row, file.url, i) for i, row in enumerate(rows, number))
            before += batch.num_rows


def _parquet(file: io.RawIOBase, columns: Collection[str] | None) -> tuple[list[str], Iterator[pa.RecordBatch]]:
    """Names of all columns, and batches of the requested ones."""
    parquet = pq.ParquetFile(file, pre_buffer=False, buffer_size=READ_AHEAD)
    names = parquet.schema_arrow.names
    selected = [name for name in names if columns is None or name in columns]
    return names, parquet.iter_batches(BATCH_ROWS, columns=selected, use_threads=False)


def _arrow(file: io.BufferedReader, columns: Collection[str] | None) -> tuple[list[str], Iterator[pa.RecordBatch]]:
    """Like `_parquet`, for both Arrow formats: the file format and the stream format, which `datasets` writes."""
    is_file = file.read(6) == b"ARROW1"

    def reader(fields: list[int]) -> Any:
        file.seek(0)
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(file, options=options)

    names = reader([]).schema.names
    chosen = reader([number for number, name in enumerate(names) if columns is None or name in columns])
    return names, map(chosen.get_batch, range(chosen.num_record_batches)) if is_file else iter(chosen)


def _is_json(kind: pa.DataType) -> bool:
    """Whether values of this type are JSON values; `_json_row` converts others."""
    if pa.types.is_dictionary(kind):
        return _is_json(kind.value_type)
    if pa.types.is_nested(kind):
        return all(_is_json(kind.field(number).type) for number in range(kind.num_fields))
    text: bool = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    number: bool = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return text or number or bool(pa.types.is_null(kind))


def _json_row(row: dict[str, Any], url: str, number: int) -> Found:
    """The row with all values as JSON: binary text is decoded, dates and other values become strings.

    Bytes that are not UTF-8 give an InputError that names the column.
    """
    converted = {}
    for name, value in row.items():
        try:
            converted[name] = json_value(value)
        except UnicodeDecodeError as error:
            return InputError(
                "text in UTF-8 in binary columns",
                f"column {name}: {error.reason} at byte {error.start}, {error.object[:20]!r}",
                f"{url}, row {number}",
                "write the column as text, or remove it",
            )
    return converted


def _json_lines(file: io.RawIOBase, url: str, columns: Collection[str] | None) -> Iterator[Found]:
    stream = _buffered(file)
    if url.lower().endswith(".gz"):
        stream = _buffered(gzip.GzipFile(fileobj=stream))
    if stream.peek(1)[:1024].lstrip()[:1] == b"[":
        raise ValueError("a JSON list: write one item per line, as jq -c '.[]' does")
    for number in itertools.count(1):
        if len(line := stream.readline(MAX_LINE + 1)) > MAX_LINE:
            raise ValueError(f"line {number} is longer than {MAX_LINE >> 20} MiB")
        if not line:
            return
        if line.strip():
            yield _record(line, f"{url}, line {number}", columns)


def _buffered(file: Any) -> io.BufferedReader:
    """Buffers the file, so that a remote one is read in few large requests."""
    return io.BufferedReader(file, READ_AHEAD)


def _record(line: bytes, where: str, columns: Collection[str] | None) -> Found:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        start = line[:80].decode("utf-8", "replace").rstrip()
        return InputError("one JSON object per line", start, where, "correct or remove the line")
    return record if columns is None else {name: value for name, value in record.items() if name in columns}


def _mark(file: _File) -> str:
    with _reading(file.url, "data"):
        if not file.is_local:
            etag = next((file.info[key] for key in _ETAGS if file.info.get(key)), None)
            return f"{file.info['size']}:{etag or file.fs.checksum(file.path)}".replace('"', "")
        with open(file.path, "rb") as opened:
            stat = os.fstat(opened.fileno())
            return f"{stat.st_size}:{stat.st_mtime_ns}:{hashlib.file_digest(opened, 'sha256').hexdigest()}"


def _change(recorded: str, file: _File) -> str:
    """Description of how the file differs from its recorded identity; empty if it does not."""
    size, _, rest = recorded.partition(":")
    with _reading(file.url, "data"):
        now = os.stat(file.path).st_size if file.is_local else file.info["size"]
        if str(now) != size:
            return f"{int(size):,} → {now:,} bytes"
        # An equal modification time suffices, so that a resume need not read all files again.
        if file.is_local and rest.startswith(f"{os.stat(file.path).st_mtime_ns}:"):
            return ""
    same = _mark(file).rpartition(":")[2] == rest.rpartition(":")[2]
    return "" if same else f"content changed ({now:,} bytes)"


class _Source(io.RawIOBase):
    """A file that records errors of its storage, because Arrow replaces some of them by its own."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.error: Exception | None = None

    def readinto(self, buffer: Any) -> int:
        try:
            data = self.file.read(len(buffer))
        except Exception as error:
            self.error = error
            raise
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return int(self.file.seek(offset, whence))

    def tell(self) -> int:
        return int(self.file.tell())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


@contextmanager
def _opened(file: _File) -> Iterator[_Source]:
    """The file, opened without fsspec's cache, which alternating reads of columns would refill each time."""
    with file.fs.open(file.path, "rb", cache_type="none") as opened:
        source = _Source(opened)
        try:
            yield source
        except Exception:
            if source.error:
                raise source.error from None
            raise


@contextmanager
def _reading(url: str, kind: str) -> Iterator[None]:
    """Convert all errors of opening and reading a file into InputError and TransientError."""
    try:
        with storage_errors(url), _damage():
            yield
    except FileNotFoundError:
        raise InputError(_DATA_FILES, "no such file", url, "use the path of an existing file") from None
    except (ValueError, pa.ArrowException) as error:
        fix = "write it again with pyarrow, pandas or another tool, or use another file"
        raise InputError(f"a valid {kind} file", (str(error).splitlines() or [""])[0], url, fix) from error
    except InputError as error:
        if error.__cause__ is None:
            raise
        fix = "use a file that this user can read" if isinstance(error.__cause__, OSError) else error.fix
        raise InputError("a readable file", error.seen, url, fix) from error


@contextmanager
def _damage() -> Iterator[None]:
    """Convert errors about damaged content to ValueError, including those raised as storage errors."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(str(error)) from error
    except OSError as error:
        # Raised by Arrow: errors of a file system have an errno or a subclass.
        if type(error) is OSError and error.errno is None:
            raise ValueError(str(error)) from error
        raise
