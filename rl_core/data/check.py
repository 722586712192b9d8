"""Check of all rows before a run: contents, dropped rows, and problems that prevent the run from starting.

Memory grows only by one hash per row: 8 bytes per training row, about 200 bytes per held-out row.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rl_core.config.data import DataConfig, SourceConfig
from rl_core.data import rules
from rl_core.data.dataset import ToolsOf, encode_prompt
from rl_core.data.report import DataReport, Problem
from rl_core.data.row_counts import Hashes, Tally, chosen_tools
from rl_core.data.rows import Found, NotScored, Row
from rl_core.data.sources import load_source
from rl_core.errors import InputError
from rl_core.runtime.process_pool import writable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DataReport", "Dropped", "Problem", "check_data"]

SPLITS = ("val", "train")
"""Held-out rows are checked first, so that training rows with one of their prompts are detected immediately."""
MAX_STOPPING_ROWS = 1000
"""Number of blocking rows after which the check stops."""
MAX_PROBLEMS = 100
"""Maximum number of distinct problems per level; further ones are not reported."""
PROGRESS_S = 2.0

Keep = Callable[[str, Row, int], None]
CheckRow = Callable[[Row, str], None]
"""Called with a row and its location; raises NotScored if no scorer scores it, or InputError if it is malformed."""


@dataclass(frozen=True)
class Dropped:
    """A row dropped according to `data.drop`, and why."""

    split: str
    where: str
    reason: str
    detail: str


def check_data(
    config: DataConfig,
    seed: int,
    tokenizer: "PreTrainedTokenizerBase",
    tools_of: ToolsOf,
    keep: Keep,
    *,
    splits: tuple[str, ...] = SPLITS,
    counted_by: str = "",
    check_row: CheckRow = lambda row, where: None,
    at_end: Callable[[], None] = lambda: None,
    on_drop: Callable[[Dropped], None] = lambda dropped: None,
    on_rows: Callable[[int], None] = lambda count: None,
    max_rows: int | None = None,
) -> DataReport:
    """Report on the rows of all sources, each read once; problems are listed in the report, not raised.

    `keep(split, row, prompt tokens)` receives every kept row until a blocking problem occurs; `check_row` judges rows
    by their scorers, and `at_end` may raise an InputError about all of them; `counted_by` describes the tokenizer;
    `on_rows(count)` is called about every two seconds; after `max_rows` rows the check ends as incomplete.
    Raises TransientError if the storage of a source fails.
    """
    begin = time.monotonic()
    check = _Check(config, tokenizer, tools_of, keep, check_row, on_drop, on_rows, max_rows)
    found = [check.guarded(_rows_of, each, seed) for each in config.sources]
    tallies = []
    for split in splits:
        for label, rows in zip(rules.labels(config.sources), found, strict=True):
            tallies.append(check.source(split, label, rows[split] if rows else ()))
    if check.complete:
        check.amounts(tallies, splits)
    check.judge(at_end)
    return DataReport(
        tokenizer=counted_by,
        max_prompt_length=config.max_prompt_length,
        drop=config.drop,
        complete=check.complete,
        seconds=time.monotonic() - begin,
        rows=tuple(tally.report() for tally in tallies),
        problems=tuple(check.problems.values()),
    )


def tokenizer_text(path: str) -> str:
    """Description of the tokenizer of a model.path."""
    return "the offline model (one per character); model.path=FOLDER selects another" if path == "tiny" else path


class _Check:
    """The state of one check."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: "PreTrainedTokenizerBase",
        tools_of: ToolsOf,
        keep: Keep,
        check_row: CheckRow,
        on_drop: Callable[[Dropped], None],
        on_rows: Callable[[int], None],
        max_rows: int | None,
    ) -> None:
        self.config, self.tokenizer, self.tools_of = config, tokenizer, tools_of
        self.keep, self.check_row, self.on_drop, self.on_rows = keep, check_row, on_drop, on_rows
        self.max_rows = max_rows
        self.problems: dict[str, Problem] = {}
        self.complete = True
        self._tools = {schema["function"]["name"]: schema for schema in tools_of({})}
        self._held_out: dict[int, str] = {}
        self._trained = Hashes()
        self._given = dict.fromkeys(SPLITS, 0)
        self._seen = self._stopping = self._longest = 0
        self._reported = time.monotonic()

    def guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        """The result of the call; an InputError is recorded as a blocking problem and gives None."""
        try:
            return call(*args)
        except InputError as error:
            self.complete = False
            return self._problem("stop", error)

    def judge(self, call: Callable[[], None]) -> None:
        """Calls after all rows; an InputError is recorded as a blocking problem."""
        try:
            call()
        except InputError as error:
            self._problem("stop", error)

    def source(self, split: str, label: str, found: Iterable[Found]) -> Tally:
        """Checks all rows of the source in the split."""
        tally = Tally(split, label)
        prefix = split if len(self.config.sources) == 1 else f"{split} ({label})"
        self.guarded(self._all, found, tally, prefix)
        return tally

    def amounts(self, tallies: list[Tally], splits: tuple[str, ...]) -> None:
        """Records splits with too few rows or too many dropped ones."""
        for split in splits:
            parts = [tally for tally in tallies if tally.split == split]
            seen = sum(tally.seen for tally in parts)
            counts = {str(reason): sum(tally.faults[reason] for tally in parts) for reason in self.config.drop}
            dropped = {reason: count for reason, count in counts.items() if count}
            found = [rule(split, seen, dropped, self.config) for rule in (rules.too_few, rules.too_many_dropped)]
            if split == "train" and len(parts) > 1:
                empty = [each for each in parts if each.seen == sum(each.faults[reason] for reason in dropped)]
                found += [rules.empty_source(each.source, each.seen) for each in empty]
            for error in found:
                if error:
                    self._problem("stop", error)

    def _all(self, found: Iterable[Found], tally: Tally, prefix: str) -> None:
        for number, row in enumerate(found, start=1):
            if self._stopping >= MAX_STOPPING_ROWS or self._seen == self.max_rows:
                self.complete = False
                return
            tally.seen += 1
            self._progress()
            where = f"{prefix} row {number}"
            if isinstance(row, InputError):
                self._fault(tally, "malformed", row)
            else:
                self._row(tally, row, where)

    def _row(self, tally: Tally, row: Row, where: str) -> None:
        tally.look(row, self._tools)
        try:
            tools = self.tools_of(row)
        except InputError as error:
            self._fault(
                tally, "unknown_tool", InputError(error.expected, error.seen, f"{error.where} of {where}", error.fix)
            )
            return
        try:
            rules.check_values(row, where)
            tokens = len(encode_prompt(self.tokenizer, row["prompt"], where, tools))
            self.check_row(row, where)
        except InputError as error:
            self._fault(tally, "not_scored" if isinstance(error, NotScored) else "malformed", error)
            return
        tally.lengths[tokens] += 1
        self._warnings(tally, row, where)
        if tokens > self.config.max_prompt_length:
            self._longest = max(self._longest, tokens)
            self._fault(tally, "overlong", rules.overlong(self.config.max_prompt_length, tokens, self._longest, where))
        elif self._fresh(tally, row, where):
            self._keep(tally, row, tokens)

    def _fresh(self, tally: Tally, row: Row, where: str) -> bool:
        """Whether to keep the row, given the prompts of earlier rows."""
        number = rules.prompt_hash(row)
        same = self._held_out.get(number)
        if tally.split == "train" and same:
            self._fault(tally, "held_out", rules.held_out(same, where))
            return False
        new = self._trained.add(number) if tally.split == "train" else same is None
        if tally.split == "val":
            self._held_out.setdefault(number, where)
        if not new:
            detail = f"the prompt of {same or 'an earlier row'}"
            tally.fault("duplicate", f"{where}: {detail}")
            if "duplicate" in self.config.drop:
                self.on_drop(Dropped(tally.split, where, "duplicate", detail))
                return False
        return True

    def _keep(self, tally: Tally, row: Row, tokens: int) -> None:
        tally.keep(row)
        if len(self.config.sources) > 1:  # each source counts from 0
            row = {**row, "extra_info": {**row["extra_info"], "index": self._given[tally.split]}}
        self._given[tally.split] += 1
        if not self._stopping and self.complete:
            self.keep(tally.split, row, tokens)

    def _fault(self, tally: Tally, kind: str, error: InputError) -> None:
        """Records a row that is not kept; it stops the run unless `data.drop` lists its kind."""
        tally.fault(kind, f"{error.where}: {error.seen}")
        if kind in self.config.drop:
            self.on_drop(Dropped(tally.split, writable(error.where), kind, writable(error.seen)))
            return
        self._stopping += 1
        if kind not in ("unknown_tool", "not_scored"):
            reasons = ",".join(dict.fromkeys([*self.config.drop, kind]))
            error = InputError(
                error.expected,
                error.seen,
                error.where,
                f"{error.fix}, or set data.drop=[{reasons}] to drop such rows",
            )
        self._problem("stop", error)
        if kind == "overlong" and error.expected in self.problems:  # the fix names the maximum length so far
            self.problems[error.expected] = dataclasses.replace(self.problems[error.expected], fix=error.fix)

    def _problem(self, level: Literal["stop", "warning"], error: InputError) -> None:
        """Records the first problem of a kind (identified by its `expected`) and counts further ones."""
        same = self.problems.get(error.expected)
        if same:
            self.problems[error.expected] = dataclasses.replace(same, rows=same.rows + 1)
        elif sum(problem.level == level for problem in self.problems.values()) < MAX_PROBLEMS:
            expected, seen, where, fix = map(writable, (error.expected, error.seen, error.where, error.fix))
            self.problems[error.expected] = Problem(level, expected, seen, where, fix)

    def _warnings(self, tally: Tally, row: Row, where: str) -> None:
        truth = (row.get("reward_model") or {}).get("ground_truth")
        if truth is None or not str(truth).strip():
            tally.missing_truth += 1
            self._problem("warning", rules.no_truth(truth, where))
        if unknown := [name for name in chosen_tools(row) if name not in self._tools]:
            self._problem("warning", rules.not_configured(unknown, where))
        for error in rules.schema_differences(row, self._tools, where):
            self._problem("warning", error)

    def _progress(self) -> None:
        self._seen += 1
        if time.monotonic() - self._reported >= PROGRESS_S:
            self._reported = time.monotonic()
            self.on_rows(self._seen)


def _rows_of(source: SourceConfig, seed: int) -> dict[str, Iterable[Found]]:
    train, val = load_source(source.source).rows(source, seed)
    return {"train": train, "val": val}
