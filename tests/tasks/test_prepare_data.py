import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_core.config.compose import compose
from rl_core.console import Console
from rl_core.data.report import DataReport
from rl_core.data.rows import make_row
from rl_core.errors import InputError
from rl_core.storage import run_files
from tasks.prepare_data import prepare_data, show
from tasks.runs.open_run import open_run
from tasks.session.session import open_session

Prepare = Callable[..., dict[str, Any]]


def write(path: Path, numbers: range) -> None:
    rows = [make_row("exact", str(i), "math", str(i), str(i), "train", i) for i in numbers]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    for name, numbers in {"a": range(4), "b": range(10, 14), "held-out": range(20, 22)}.items():
        write(folder / f"{name}.jsonl", numbers)
    return folder


@pytest.fixture
def prepare(folder: Path, tmp_path: Path, sqlite_uri: str) -> Prepare:
    """The stage in a session of the run `mixed`, whose two sources read the folder's files."""
    held_out = folder / "held-out.jsonl"
    entries = [
        f"{{source: files, path: {folder / name}, val_path: {held_out}, val_rows: {rows}}}"
        for name, rows in (("a.jsonl", 2), ("b*.jsonl", 1))
    ]
    settings = [f"data.mixture=[{', '.join(entries)}]", "data.train_batch_size=2"]

    def prepared(**options: Any) -> dict[str, Any]:
        run = open_run(compose("grpo", settings), tmp_path, "mixed")  # where the database of `sqlite_uri` is
        with open_session(run, **options) as session:
            return prepare_data.__wrapped__(session)  # type: ignore[attr-defined, no-any-return]

    return prepared


def test_a_resumed_run_whose_files_are_as_they_were_uses_its_rows(prepare: Prepare, folder: Path) -> None:
    first = prepare()
    assert [source["train_rows"] for source in first["sources"]] == [4, 4]
    assert len(first["files"]) == 3 and first["data_sources"] == {"exact": 11}
    os.utime(folder / "a.jsonl")  # touched or copied, with the same content
    assert prepare() == first


def test_the_stage_tells_what_was_dropped_and_warns() -> None:
    rows = {"source": "files", "seen": 9, "faults": {}, "examples": {}, "columns": {}, "data_sources": {}, "tools": {},
            "unknown_tools": {}, "turns": {}, "missing_truth": 0, "lengths": None, "samples": ()}  # fmt: skip
    train = rows | {"split": "train", "kept": 7, "faults": {"overlong": 2, "duplicate": 1}}
    report = DataReport.from_json(
        {"tokenizer": "tiny", "max_prompt_length": 4, "drop": ["overlong"], "complete": True, "seconds": 1.0,
         "rows": [train, rows | {"split": "val", "kept": 9}],
         "problems": [{"level": "warning", "expected": "e", "seen": "\x1b[2J", "where": "w", "fix": "f", "rows": 3}]}
    )  # fmt: skip
    show(report, "/runs/mine", Console(said := io.StringIO()))
    first, *others = said.getvalue().splitlines()
    told = "7 training rows, 9 held out; 1 repeat a prompt; dropped 2 (overlong 2)"
    assert first.strip() == f"{told}, listed in /runs/mine/data/dropped.jsonl"
    assert others[0] == "! warning" and "(3 rows of this kind)" in others[2] and "\x1b" not in said.getvalue()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: write(folder / "a.jsonl", range(5)), r"a\.jsonl: 828 → 1,035 bytes"),
        (lambda folder: write(folder / "held-out.jsonl", range(30, 32)), r"held-out\.jsonl: content changed"),
        (lambda folder: write(folder / "b2.jsonl", range(2)), r"new file .*b2\.jsonl"),
        (lambda folder: (folder / "b.jsonl").unlink(), r"b\.jsonl is gone"),
        (lambda folder: shutil.rmtree(folder), r"a\.jsonl is gone; .*b\.jsonl is gone; .*held-out\.jsonl is gone"),
    ],
    ids=["longer", "held-out", "new", "gone", "all gone"],
)
def test_a_resumed_run_is_refused_when_its_files_have_changed(
    prepare: Prepare, folder: Path, change: Callable[[Path], None], says: str
) -> None:
    first = prepare()
    change(folder)
    with pytest.raises(InputError, match=says) as error:
        prepare()
    assert "--run mixed --keep-data" in error.value.fix and "--new" in error.value.fix
    assert prepare(keep_data=True) == first


def test_check_and_run_judge_many_data_sources_alike(folder: Path, tmp_path: Path, sqlite_uri: str) -> None:
    """A report names at most 200 data sources; the scorers of all are judged row by row."""
    names = [f"source {i}" for i in range(250)]
    rows = [make_row(name, str(i), "math", str(i), str(i), "train", i) for i, name in enumerate(names)]
    (folder / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    held_out = folder / "held-out.jsonl"
    held_out.write_text(json.dumps(make_row(names[0], "x", "math", "1", "1", "val", 0)) + "\n")
    sources = ",".join(f"{name}=exact" for name in names)
    files = ["data.source=files", f"data.path={folder / 'a.jsonl'}", f"data.val_path={held_out}"]

    def prepared(name: str, scored: str) -> dict[str, Any]:
        settings = [*files, "data.train_batch_size=2", f"reward.sources=[{scored}]"]
        with open_session(open_run(compose("grpo", settings), tmp_path, name)) as session:
            return prepare_data.__wrapped__(session)  # type: ignore[attr-defined, no-any-return]

    assert prepared("many", sources)["train_rows"] == 250
    with pytest.raises(InputError, match="'source 249'"):
        prepared("less", sources.rpartition(",")[0])


def test_rows_are_committed_only_after_the_trial_of_the_users_scorers(
    folder: Path, tmp_path: Path, sqlite_uri: str
) -> None:
    rows = [make_row("exact", str(i), "math", "text", "text", "train", i) for i in range(4)]  # a score that is a text
    for name, part in (("a", rows[1:]), ("held-out", rows[:1])):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part))
    files = ["data.source=files", f"data.path={folder / 'a.jsonl'}", f"data.val_path={folder / 'held-out.jsonl'}"]
    settings = [*files, "data.train_batch_size=2", "reward.function=scorers_for_tests:by_response"]
    with open_session(open_run(compose("grpo", settings), tmp_path, "broken")) as session:
        with pytest.raises(InputError, match="a score from `scorers_for_tests:by_response`"):
            prepare_data.__wrapped__(session)  # type: ignore[attr-defined]
        assert session.store.read_manifest(run_files.DATA) is None
