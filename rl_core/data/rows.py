"""Rows of a data set: their layout, their files and their hash."""

import hashlib
import io
import json
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rl_core.errors import InputError
from rl_core.storage import Store

Row = dict[str, Any]
"""One problem: data_source, prompt (messages), ability, reward_model {style, ground_truth}, extra_info."""


def make_row(source: str, question: str, ability: str, ground_truth: str, answer: str, split: str, index: int) -> Row:
    """A row with one user message; `answer` is the text that a perfect model would give."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, "answer": answer},
    }


def read_rows(url: str) -> list[Row]:
    """Rows of one parquet or JSON-lines file at a path or fsspec URL.

    Raises InputError when the file is missing, empty, unreadable or of another format, TransientError when the
    storage behind the URL fails.
    """
    folder, slash, name = url.rpartition("/")
    try:
        data = Store(folder + slash if slash else ".").read_bytes(name)
    except FileNotFoundError:
        raise InputError(
            "a .parquet or .jsonl file", "no such file", url, "give the path of an existing file"
        ) from None
    except InputError as error:
        fix = "give the path or URL of a file that can be read, and credentials where it needs them"
        raise InputError("a readable .parquet or .jsonl file", error.seen, url, fix) from error
    rows = parse_json_lines(data, url) if url.endswith(".jsonl") else parse_parquet(data, url)
    if not rows:
        raise InputError("at least one row", "an empty file", url, "write rows into it or give another file")
    return rows


def parse_json_lines(data: bytes, where: str) -> list[Row]:
    """Rows of a JSON-lines file; raises InputError naming the line that is not a JSON object."""
    rows = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            row = error
        if not isinstance(row, dict):
            seen = line[:80].decode("utf-8", "replace")
            raise InputError("one JSON object per line", seen, f"{where}, line {number}", "correct or remove the line")
        rows.append(row)
    return rows


def parse_parquet(data: bytes, where: str) -> list[Row]:
    """Rows of a parquet file's bytes; raises InputError when they are no parquet file."""
    try:
        return pq.read_table(io.BytesIO(data)).to_pylist()
    except pa.ArrowInvalid as error:
        seen = "an empty file" if not data else str(error).splitlines()[0]
        raise InputError(
            "a parquet file", seen, where, "write it with pyarrow, pandas or another parquet tool"
        ) from error


def to_table(rows: list[Row], where: str) -> pa.Table:
    """Rows as a table of typed columns; raises InputError when a column mixes types."""
    try:
        return pa.Table.from_pylist(rows)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, UnicodeEncodeError) as error:
        raise InputError("one type of valid values per column", str(error), where, "correct the rows") from error


def parquet_bytes(table: pa.Table) -> bytes:
    """The table as a parquet file."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def content_hash(splits: Iterable[list[Row]]) -> str:
    """sha256 over the rows in canonical JSON: the same for the same content, whatever wrote the files."""
    digest = hashlib.sha256()
    for rows in splits:
        for row in rows:
            digest.update(canonical(row).encode() + b"\n")
        digest.update(b"\n")
    return digest.hexdigest()


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces, ASCII only; values that JSON lacks (dates, bytes) by their text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
