"""`rollforward data check`: a summary of the rows and of all problems that would stop a run; starts nothing."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.config.compose import compose, recipe_names
from rl_core.config.schema import RunConfig
from rl_core.console import Console, clean
from rl_core.data.check import check_data, tokenizer_text
from rl_core.data.dataset import ToolsOf, check_tokenizer, without_tools
from rl_core.data.report import DataReport, Problem, RowsReport, columns_of, counted, described, in_rows, total
from rl_core.errors import InputError
from rl_core.rewards.row_check import RowCheck
from rl_core.rewards.runner import check_scorers
from rl_core.rollout.agent.tool_runner import tool_schemas
from rl_core.rollout.agent.toolbox import row_schemas

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAMES = {"train": "training rows", "val": "held-out rows"}


def data_check(target: str, overrides: Sequence[str], val: str | None, html: str | None, console: Console) -> int:
    """Prints the summary of a recipe's rows or of files; returns 2 if a run would reject them, else 0."""
    sys.path.append(os.getcwd())  # as in a run, for the user's scorers and tools
    by_path = not _is_recipe(target)
    if val and not by_path:
        raise InputError(
            expected="--val only with a path of rows",
            seen=f"the recipe {target}",
            where=f"--val {val}",
            fix=f"set data.val_path={val} instead",
        )
    config = _path_config(target, val, overrides) if by_path else compose(target, overrides).config
    check_scorers(config.reward, {})
    check_row = RowCheck(config.reward)
    report = check_data(
        config.data,
        config.trainer.seed,
        _tokenizer(config),
        _tools_of(config, by_path),
        lambda split, row, tokens: None,
        splits=("train",) if by_path and val is None else ("val", "train"),
        counted_by=tokenizer_text(config.model.path),
        check_row=check_row,
        on_rows=lambda count: console.note(f"{in_rows(count)} read"),
    )
    try:
        check_row.try_scorers()
    except InputError as error:
        problem = Problem("stop", error.expected, error.seen, error.where, error.fix)
        report = replace(report, problems=(*report.problems, problem))
    _show(report, target, console)
    if html:
        _write_page(report, target, Path(html), console)
    return 2 if report.stops else 0


def _is_recipe(target: str) -> bool:
    """Whether the target is a recipe; a word that cannot be a path counts as a misspelt one."""
    looks_like_path = set(target) & set("./*[\\") or Path(target).exists()
    return target in recipe_names() or target.endswith(".yaml") or not looks_like_path


def _path_config(path: str, val: str | None, overrides: Sequence[str]) -> RunConfig:
    """The settings of a run with files of rows; the batch size is still unknown, so 1 is used."""
    given = {"source": "files", "path": path, "val_path": val or path, "train_batch_size": 1}
    settings = [f"data.{name}={json.dumps(value)}" for name, value in given.items()]
    return compose("grpo", ["actor.mini_batch_size=null", *settings, *overrides]).config


def _tokenizer(config: RunConfig) -> "PreTrainedTokenizerBase":
    if config.model.path == "tiny":
        from rl_core.models.tokenizer import build_tokenizer

        return build_tokenizer()
    from rl_core.models.load import load_tokenizer  # takes seconds
    from rl_core.models.template import change_template

    tokenizer = load_tokenizer(Path(config.model.path).expanduser())
    change_template(tokenizer, config.model.chat_template, config.data.chat_template_kwargs)
    check_tokenizer(tokenizer, config.model.path)
    return tokenizer


def _tools_of(config: RunConfig, by_path: bool) -> ToolsOf:
    """The tools of rows; files alone do not define the tools of a run."""
    schemas = tool_schemas(config.agent)
    return row_schemas(schemas) if schemas or not by_path else without_tools


def _show(report: DataReport, target: str, console: Console) -> None:
    lines = [_line(rows, report) for rows in report.rows] + _common(report)
    console.table([(name, _printable(value)) for name, value in lines], f"Rows of {target}")
    for problem in report.problems:
        show = console.error if problem.level == "stop" else console.warning
        show(problem.error)
    if not report.complete:
        console.note("stopped early: not all rows were checked")
    console.note("a run would reject these rows" if report.stops else "a run would accept these rows")


def _printable(text: str) -> str:
    """Cleans each line of text that comes from data."""
    return "\n".join(clean(line) for line in text.split("\n"))


def _line(rows: RowsReport, report: DataReport) -> tuple[str, str]:
    name = NAMES[rows.split] + (f", {rows.source}" if len(report.of(rows.split)) > 1 else "")
    lines = [f"{rows.seen:,} read, {rows.kept:,} kept" + (f" ({counted(rows.faults)})" if rows.faults else "")]
    if rows.lengths:
        lines.append(f"tokens per prompt: {described(rows.lengths)}")
        lines.append(f"messages per prompt: {', '.join(f'{n} ({count:,} rows)' for n, count in rows.turns.items())}")
    if rows.missing_truth:
        lines.append(f"without ground truth: {rows.missing_truth:,}")
    return name, "\n".join(lines)


def _common(report: DataReport) -> list[tuple[str, str]]:
    tools, unknown = (total(getattr(rows, name) for rows in report.rows) for name in ("tools", "unknown_tools"))
    columns = [
        f"{name}: {kinds}" + (f", missing in {nulls}" if nulls else "") for name, kinds, nulls in columns_of(report)
    ]
    lines = {
        "data sources": _first(report.data_sources),
        "tools": _first(tools),
        "unknown tools": _first(unknown),
        "columns": "\n".join(columns),
        "tokenizer": report.tokenizer,
        "time": report.pace,
    }
    return [(name, value) for name, value in lines.items() if value]


def _first(counts: dict[str, int], shown: int = 10) -> str:
    """The `shown` largest counts as text, and the number of the others."""
    more = f", {len(counts) - shown:,} more" if len(counts) > shown else ""
    return ", ".join(f"{name} ({in_rows(count)})" for name, count in list(counts.items())[:shown]) + more


def _write_page(report: DataReport, target: str, file: Path, console: Console) -> None:
    from rl_core.data.page import render_data_report  # takes a moment

    try:
        file.write_text(render_data_report(report, target), encoding="utf-8")
    except OSError as error:
        raise InputError(
            expected="a writable file", seen=str(error), where=f"--html {file}", fix="choose another file"
        ) from error
    console.note(f"page: {file}")
