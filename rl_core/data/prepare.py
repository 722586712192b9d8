"""Prepares the rows of a run: from sources to the committed files used for training and evaluation."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.config.data import DataConfig
from rl_core.config.schema import RunConfig
from rl_core.data.check import CheckRow, Dropped, check_data, tokenizer_text
from rl_core.data.dataset import ToolsOf, check_tokenizer, without_tools
from rl_core.data.files import file_identity
from rl_core.data.page import render_data_report
from rl_core.data.report import DataReport, counted
from rl_core.data.store import RowWriter, data_hash
from rl_core.runtime.guardian import staging
from rl_core.storage import run_files
from rl_core.storage.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prepare_data(
    config: RunConfig,
    store: Store,
    tokenizer: "PreTrainedTokenizerBase",
    tools_of: ToolsOf = without_tools,
    on_rows: Callable[[int], None] = lambda count: None,
    check_row: CheckRow = lambda row, where: None,
    at_end: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Check all rows and commit the kept ones with a report; if that is already done, only read the result.

    The folder `data` then holds the rows, `report.json`, `report.html`, and `dropped.jsonl` with one line per dropped
    row. `on_rows(count)` is called about every two seconds; `check_row` and `at_end` judge rows by their scorers.
    Returns {train_rows, val_rows, dropped: {split: {reason: count}}, data_hash, data_sources: {data_source: rows},
    sources: [{source, train_rows, weight}], files: {name: mark}}. Raises InputError for the first problem that prevents
    the run from starting.
    """
    manifest = store.read_manifest(run_files.DATA)
    if manifest is None:
        manifest = _prepare(config, store, tokenizer, tools_of, on_rows, check_row, at_end)
    meta: dict[str, Any] = manifest["meta"]
    return meta


def read_report(store: Store) -> DataReport:
    """The report on the committed rows."""
    return DataReport.from_json(store.read_json(run_files.DATA_REPORT))


def summary(report: DataReport) -> str:
    """The rows as text: `70 training rows, 9 held out; 3 repeat a prompt; dropped 12 (overlong 10, malformed 2)`."""
    dropped: dict[str, int] = {}
    for split in ("train", "val"):
        for reason, count in report.dropped(split).items():
            dropped[reason] = dropped.get(reason, 0) + count
    repeats = 0 if "duplicate" in report.drop else sum(rows.faults.get("duplicate", 0) for rows in report.of("train"))
    text = f"{report.kept('train'):,} training rows, {report.kept('val'):,} held out"
    text += f"; {repeats:,} repeat a prompt" if repeats else ""
    return f"{text}; dropped {sum(dropped.values()):,} ({counted(dropped)})" if dropped else text


def _prepare(
    config: RunConfig,
    store: Store,
    tokenizer: "PreTrainedTokenizerBase",
    tools_of: ToolsOf,
    on_rows: Callable[[int], None],
    check_row: CheckRow,
    at_end: Callable[[], None],
) -> dict[str, Any]:
    check_tokenizer(tokenizer, config.model.path)
    store.remove(run_files.DATA)  # left by an interrupted attempt
    # Identities are taken before reading, so that changes during the read are detected.
    files = file_identity(config.data.paths) if config.data.paths else {}
    writers = {split: RowWriter(store, split) for split in ("train", "val")}
    with staging() as folder:
        with Path(folder, "dropped.jsonl").open("w", encoding="utf-8") as listed:

            def on_drop(dropped: Dropped) -> None:
                listed.write(json.dumps(asdict(dropped), ensure_ascii=False) + "\n")

            report = check_data(
                config.data,
                config.trainer.seed,
                tokenizer,
                tools_of,
                lambda split, row, tokens: writers[split].add(row, tokens),
                counted_by=tokenizer_text(config.model.path),
                check_row=check_row,
                at_end=at_end,
                on_drop=on_drop,
                on_rows=on_rows,
            )
        if report.stops:
            store.remove(run_files.DATA)
            raise report.stops[0].error
        digests = [writer.close() for writer in writers.values()]
        pages = {
            run_files.DATA_REPORT: json.dumps(report.as_json(), ensure_ascii=False),
            run_files.DATA_PAGE: render_data_report(report, _title(config.data)),
        }
        for name, text in pages.items():
            Path(folder, Path(name).name).write_text(text, encoding="utf-8")
        parts = [entry for writer in writers.values() for entry in writer.files]
        parts += store.upload(folder, run_files.DATA)
    return store.commit_folder(run_files.DATA, _meta(config.data, report, data_hash(digests), files), parts)


def _meta(config: DataConfig, report: DataReport, digest: str, files: dict[str, str]) -> dict[str, Any]:
    trained = zip(config.sources, report.of("train"), strict=True)
    return {
        "train_rows": report.kept("train"),
        "val_rows": report.kept("val"),
        "dropped": {split: report.dropped(split) for split in ("train", "val")},
        "data_hash": digest,
        "data_sources": report.data_sources,
        "sources": [
            {"source": source.source, "train_rows": rows.kept, "weight": source.weight} for source, rows in trained
        ],
        "files": files,
    }


def _title(config: DataConfig) -> str:
    return " and ".join(dict.fromkeys(source.source for source in config.sources))
