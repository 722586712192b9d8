"""Data files on a local folder and on an S3 server (a real one on this machine, spoken to over HTTP)."""

import datetime
import gzip
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import EndpointConnectionError
from s3fs import S3FileSystem
from support_servers import empty_bucket, free_port

from rl_core.config.data import SourceConfig
from rl_core.data.files import Paths, _found, changed_files, file_identity, read_records
from rl_core.data.sources import files
from rl_core.errors import InputError, TransientError
from rl_core.storage.store import Store

Rows = list[dict[str, Any]]
ROWS: Rows = [{"n": i, "text": f"row {i}\u2028", "deep": {"list": [i, None]}, "more": "x" * 50} for i in range(700)]
WANTED = [{"n": row["n"], "deep": row["deep"]} for row in ROWS]


def json_lines(rows: Rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n\n" for row in rows)


def columns(rows: Rows, write: Callable[[pa.Table, pa.BufferOutputStream], None]) -> bytes:
    sink = pa.BufferOutputStream()
    write(pa.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue())


def write_stream(table: pa.Table, sink: pa.BufferOutputStream) -> None:
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def written(name: str, table: pa.Table) -> bytes:
    """A file of several batches with this table."""
    sink = pa.BufferOutputStream()
    if name == "a.parquet":
        pq.write_table(table, sink, row_group_size=100)
    elif name == "a.feather":
        feather.write_feather(table, sink, chunksize=100)
    else:
        write_stream(table, sink)
    return bytes(sink.getvalue())


FORMATS: dict[str, Callable[[Rows], bytes]] = {
    "a.parquet": lambda rows: columns(rows, lambda table, sink: pq.write_table(table, sink, row_group_size=300)),
    "a.jsonl": json_lines,
    "a.json": json_lines,
    "a.jsonl.gz": lambda rows: gzip.compress(json_lines(rows)),
    "a.json.gz": lambda rows: gzip.compress(json_lines(rows)),
    "a.arrow": lambda rows: columns(rows, write_stream),
    "a.feather": lambda rows: columns(rows, lambda table, sink: feather.write_feather(table, sink, chunksize=300)),
}


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "local":
        return Store(str(tmp_path))
    empty_bucket(request.getfixturevalue("s3_endpoint"), monkeypatch)
    return Store("s3://runs/team/data")


def data_files(path: Paths) -> list[str]:
    return [file.url for file in _found(path)]


def records(path: str | tuple[str, ...], wanted: set[str] | None = None) -> list[Any]:
    return [record for record, _ in read_records(path, wanted)]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(FORMATS[name](ROWS))
    found = list(read_records(str(file), {"n", "deep", "absent"}))
    assert [record for record, _ in found] == WANTED
    assert [where for _, where in found[:2]] == [f"{file}, row 1", f"{file}, row 2"]
    assert records(str(file)) == ROWS


def test_a_path_may_be_a_file_several_a_folder_or_a_pattern(store: Store) -> None:
    named = [f"{store.url}/sub/{name}" for name in sorted(FORMATS)]
    for number, name in enumerate(sorted(FORMATS)):
        store.write_bytes(f"sub/{name}", FORMATS[name](ROWS[number:]))
    everything = [record for number in range(len(FORMATS)) for record in ROWS[number:]]
    assert records(named[0]) == ROWS
    assert records(tuple(named[::-1])) == [record for n in reversed(range(len(FORMATS))) for record in ROWS[n:]]
    for path in (f"{store.url}/", f"{store.url}/s*/?.*", f"{store.url}/s*"):
        assert data_files(path) == named and records(path) == everything
    assert data_files((named[1], f"{store.url}/sub")) == [named[1], named[0], *named[2:]]


def test_files_are_in_natural_order_and_what_is_no_data_is_left_out(store: Store) -> None:
    names = ["10.jsonl", "2.parquet", "a1/20.JSONL", "a1/3.jsonl"]
    others = [".hidden.jsonl", "_meta/a.jsonl", "README.md", "a1/.cache/b.json", "dataset_info.json", "a1/state.json"]
    for name in names + others:
        store.write_bytes(name, b"{}\n")
    ordered = ["2.parquet", "10.jsonl", "a1/3.jsonl", "a1/20.JSONL"]
    assert data_files(store.url) == [f"{store.url}/{name}" for name in ordered]


def test_paths_that_name_no_data_say_so(store: Store, tmp_path: Path) -> None:
    store.write_bytes("rows.csv", b"a,b\n")
    store.write_bytes("empty/README.md", b"")
    for name, seen in {
        "absent.jsonl": "no such file",
        "empty": "a folder without such files",
        "*.jsonl": "no such file",
        "rows.csv": "a file of another format",
    }.items():
        with pytest.raises(InputError, match=seen) as error:
            data_files((f"{store.url}/{name}",))
        assert error.value.where == f"{store.url}/{name}"
    with pytest.raises(InputError, match="Protocol not known"):
        data_files("nowhere://rows.jsonl")


def test_storage_that_is_down_is_worth_a_retry_and_missing_credentials_are_not(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    empty_bucket(s3_endpoint, monkeypatch)
    Store("s3://runs").write_bytes("a.jsonl", b"{}\n")
    reader = read_records("s3://runs/a.jsonl", None)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    assert next(reader)[0] == {}  # opened where it was found
    with pytest.raises(TransientError):
        data_files("s3://runs/a.jsonl")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InputError, match="set AWS_ACCESS_KEY_ID") as error:
        data_files("s3://runs/a.jsonl")
    assert error.value.where == "s3://runs/a.jsonl"


@pytest.mark.parametrize("name", ["a.parquet", "a.feather"])
def test_values_that_json_lacks_become_texts(tmp_path: Path, name: str) -> None:
    day = datetime.date(2026, 3, 1)
    row = {"day": day, "deep": [{"at": datetime.datetime(2026, 3, 1, 12), "n": 1}], "kind": "a", "share": 0.5}
    (tmp_path / name).write_bytes(FORMATS[name]([row]))
    assert records(str(tmp_path)) == [row | {"day": "2026-03-01", "deep": [{"at": "2026-03-01 12:00:00", "n": 1}]}]


@pytest.mark.parametrize("name", ["a.parquet", "a.feather", "a.arrow"])
@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.binary())])
def test_binary_columns_are_text_in_utf8(tmp_path: Path, name: str, kind: pa.DataType) -> None:
    questions = pa.array(["2 × 3?".encode(), b"1 + 1?", None] * 100).cast(kind)
    answers = pa.array([{"content": "6 €".encode(), "parts": [b"a"]}] * 300)
    pairs = pa.array([[(b"k", b"v")]] * 300, pa.map_(pa.binary(), pa.binary()))
    table = pa.table({"q": questions, "a": answers, "m": pairs})
    (tmp_path / name).write_bytes(written(name, table))
    wanted = {"a": {"content": "6 €", "parts": ["a"]}, "m": {"k": "v"}}
    assert records(str(tmp_path)) == [{"q": q, **wanted} for q in ["2 × 3?", "1 + 1?", None] * 100]


@pytest.mark.parametrize("name", ["a.parquet", "a.feather"])
def test_bytes_that_are_no_text_are_an_error_of_their_row(tmp_path: Path, name: str) -> None:
    values = [f"question {i}".encode() for i in range(500)]
    values[430] = "Ä".encode("latin-1")
    rows = [{"q": value, "deep": {"n": [value]}} for value in values]
    (tmp_path / name).write_bytes(written(name, pa.Table.from_pylist(rows)))
    found = [found for found, _ in read_records(str(tmp_path), ["deep"])]
    wrong = found.pop(430)
    assert isinstance(wrong, InputError) and wrong.where == f"{tmp_path / name}, row 431"
    assert wrong.seen.startswith("column deep: ") and "UTF-8" in wrong.expected
    assert found == [{"deep": {"n": [value.decode()]}} for i, value in enumerate(values) if i != 430]


@pytest.mark.parametrize("name", ["a.parquet", "a.feather", "a.jsonl.gz"])
def test_storage_that_fails_in_the_middle_is_worth_a_retry(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    empty_bucket(s3_endpoint, monkeypatch)
    noise = [{"n": i, "noise": os.urandom(1000).hex()} for i in range(4000)]
    Store("s3://runs").write_bytes(name, FORMATS[name](noise))
    reader = read_records(f"s3://runs/{name}", None)
    assert next(reader)[0] == noise[0]
    # Requests of the open file go to nobody from now on.
    monkeypatch.setattr(S3FileSystem, "_call_s3", refuse)
    with pytest.raises(TransientError, match=f"s3://runs/{name}"):
        list(reader)


async def refuse(*args: Any, **kwargs: Any) -> None:
    raise EndpointConnectionError(endpoint_url="http://gone")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.parquet", b"", "a valid parquet file"),
        ("a.parquet", FORMATS["a.parquet"](ROWS)[:-40], "a valid parquet file"),
        (
            "a.parquet",
            FORMATS["a.parquet"](ROWS)[:4] + bytes(4000) + FORMATS["a.parquet"](ROWS)[4004:],
            "a valid parquet file",
        ),
        ("a.arrow", b"question,answer\n", "a valid Arrow file"),
        ("a.feather", FORMATS["a.feather"](ROWS)[:-40], "a valid Arrow file"),
        ("a.jsonl.gz", b'{"a": 1}\n', "a valid JSON lines file"),
        ("a.jsonl.gz", FORMATS["a.jsonl.gz"](ROWS)[:-40], "a valid JSON lines file"),
        ("a.json", b' \n[{"a": 1},\n{"a": 2}]', "one item per line"),
        ("a.jsonl", b"\n", "an empty file"),
    ],
)
def test_damaged_and_foreign_files_are_named(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=says) as error:
        records(str(tmp_path))
    assert error.value.where == f"{tmp_path}/{name}"


def test_a_line_that_is_no_record_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    deep = b'{"a":' * 100_000
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n\n{"a": \n[1]\n\xff\n' + deep + b'\n{"a": 2}')
    first, *wrong, last = read_records(str(tmp_path), None)
    assert (first, last) == (({"a": 1}, f"{tmp_path}/a.jsonl, row 1"), ({"a": 2}, f"{tmp_path}/a.jsonl, row 6"))
    problems = [problem for problem, _ in wrong if isinstance(problem, InputError)]
    assert [(problem.seen[:6], problem.where) for problem in problems] == [
        (seen, f"{tmp_path}/a.jsonl, line {line}")
        for seen, line in (('{"a":', 3), ("[1]", 4), ("\ufffd", 5), ('{"a":{', 6))
    ]


@pytest.mark.parametrize("name", ["a.parquet", "a.feather"])
def test_columns_that_nobody_asked_for_are_not_read(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    blobs = pa.array([os.urandom(100_000) for _ in range(300)])
    table = pa.table({"question": [str(i) for i in range(300)], "blob": blobs, "answer": range(300)})
    if name == "a.parquet":
        pq.write_table(table, file, compression="none", use_dictionary=False)
    else:
        feather.write_feather(table, file, compression="uncompressed")
    content = file.read_bytes()
    damaged = content.replace(blobs[7].as_py(), bytes(100_000))
    assert damaged != content
    file.write_bytes(damaged)
    before = bytes_read()
    train, _ = files.rows(SourceConfig(source="files", path=str(file), val_path=str(file)), 0)
    truths = [row["reward_model"]["ground_truth"] for row in train if isinstance(row, dict)]
    assert truths == [str(i) for i in range(300)]
    assert bytes_read() - before < len(content) / 5


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


PASS = """
import re, sys
from rl_core.config.data import SourceConfig
from rl_core.data.sources import files
train, _ = files.rows(SourceConfig(source="files", path=sys.argv[1], val_path=sys.argv[1]), 0)
print(sum(type(row) is dict for row in train), re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""
"""Not by getrusage: its peak begins with that of the process which started this one."""


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_a_pass_over_many_rows_needs_no_more_memory(tmp_path: Path, ending: str) -> None:
    def peak(rows: int) -> int:
        """MiB of a process that reads so many rows."""
        file = tmp_path / f"{rows}.{ending}"
        problems = {"question": [f"{i} " * 40 for i in range(rows)], "answer": [str(i) for i in range(rows)]}
        if ending == "parquet":
            pq.write_table(pa.table(problems), file, row_group_size=rows, compression="none")
        else:
            with file.open("w") as lines:
                lines.writelines(
                    f'{{"question": "{q}", "answer": "{a}"}}\n' for q, a in zip(*problems.values(), strict=True)
                )
        command = [sys.executable, "-c", PASS, str(file)]
        read, kib = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        assert int(read) == rows
        return int(kib) // 1024

    assert peak(300_000) - peak(10_000) < 40


def test_changes_of_files_are_told_and_copies_are_none(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "c/1.jsonl", "c/2.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b'{"n": 1}\n' * 120)
    recorded = file_identity(str(tmp_path))
    assert list(recorded) == ["a.jsonl", "b.jsonl", "c/1.jsonl", "c/2.jsonl"]
    assert changed_files(recorded, str(tmp_path)) == []
    copied = tmp_path.with_name("copied")
    shutil.copytree(tmp_path, copied, copy_function=shutil.copyfile)
    assert changed_files(recorded, str(copied)) == []
    (copied / "a.jsonl").unlink()
    (copied / "b.jsonl").write_bytes(b'{"n": 2}\n' * 120)
    (copied / "c/2.jsonl").write_bytes(b'{"n": 1}\n' * 121)
    (copied / "c/10.jsonl").write_bytes(b"{}\n")
    assert changed_files(recorded, str(copied)) == [
        "a.jsonl is gone",
        "b.jsonl: content changed (1,080 bytes)",
        "c/2.jsonl: 1,080 → 1,089 bytes",
        "new file c/10.jsonl",
    ]
    shutil.rmtree(copied)
    assert changed_files(recorded, str(copied)) == [f"{name} is gone" for name in recorded]


def test_a_file_that_looks_untouched_is_not_read_again(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(bytes(20_000_000))
    recorded = file_identity(str(file))
    assert recorded["a.jsonl"].startswith(f"20000000:{file.stat().st_mtime_ns}:")
    before = bytes_read()
    assert changed_files(recorded, str(file)) == []
    assert bytes_read() - before < 100_000


def test_of_several_paths_files_with_the_same_name_are_told_apart(tmp_path: Path) -> None:
    paths = tuple(f"{tmp_path}/{name}/train.jsonl" for name in ("one", "two"))
    for path in paths:
        Path(path).parent.mkdir()
        Path(path).write_text("{}\n")
    recorded = file_identity(paths)
    assert list(recorded) == list(paths)
    Path(paths[1]).unlink()
    assert changed_files(recorded, paths) == [f"{paths[1]} is gone"]


def test_remote_files_are_known_by_size_and_etag(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_bucket(s3_endpoint, monkeypatch)
    store = Store("s3://runs/data")
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        store.write_bytes(name, b"{}\n")
    recorded = file_identity(store.url)
    assert recorded["a.jsonl"] == recorded["b.jsonl"] == "3:8a80554c91d9fca8acb82f023de02f11"
    store.write_bytes("a.jsonl", b"{}\n")
    store.write_bytes("b.jsonl", b"[]\n")
    store.write_bytes("c.jsonl", b"{}\n{}\n")
    assert changed_files(recorded, store.url) == ["b.jsonl: content changed (3 bytes)", "c.jsonl: 3 → 6 bytes"]


def test_a_line_of_any_length_takes_bounded_memory(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl.gz"
    with gzip.open(file, "wb", compresslevel=1) as rows:
        rows.write(json_lines(ROWS[:1]) + b'{"a": "')
        for _ in range(200):
            rows.write(b" " * (1 << 20))
    tracemalloc.start()
    with pytest.raises(InputError, match="is longer than 16 MiB") as raised:
        list(read_records(str(file), None))
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
    assert raised.value.where == str(file)
