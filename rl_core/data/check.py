"""One look at all rows before a run: what is in them, what is left out, and what keeps the run from starting.

Memory does not grow with the rows but for one hash each: 8 bytes a training row, about 200 a held-out one.
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
from rl_core.data.rows import Found, Row
from rl_core.data.sources import load_source
from rl_core.errors import InputError
from rl_core.runtime.process_pool import writable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DataReport", "Dropped", "Problem", "check_data"]

SPLITS = ("val", "train")
"""Held-out rows come first, so that a training row with one of their prompts is known at once."""
MAX_STOPPING_ROWS = 1000
"""Rows that keep the run from starting, after which the look ends: more of them tell a person nothing new."""
MAX_PROBLEMS = 100
"""Kinds of problems of each level that are told apart."""
PROGRESS_S = 2.0

Keep = Callable[[str, Row, int], None]


@dataclass(frozen=True)
class Dropped:
    """A row that `data.drop` has left out, and why."""

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
    on_drop: Callable[[Dropped], None] = lambda dropped: None,
    on_rows: Callable[[int], None] = lambda count: None,
) -> DataReport:
    """What is in the rows of all sources, each read once; problems are in the report and are not raised.

    `keep(split, row, prompt tokens)` gets every row that stays, until something stops the run; `counted_by` says whose
    the tokens are; `on_rows(count)` is called about every two seconds. Raises TransientError when the storage behind a
    source fails.
    """
    begin = time.monotonic()
    check = _Check(config, tokenizer, tools_of, keep, on_drop, on_rows)
    found = [check.guarded(_rows_of, each, seed) for each in config.sources]
    tallies = []
    for split in splits:
        for label, rows in zip(rules.labels(config.sources), found, strict=True):
            tallies.append(check.source(split, label, rows[split] if rows else ()))
    if check.complete:
        check.amounts(tallies, splits)
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
    """Whose tokens are counted, in words, for a model.path."""
    return "the offline model, one a character; model.path=FOLDER counts another model's" if path == "tiny" else path


class _Check:
    """The state of one look."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: "PreTrainedTokenizerBase",
        tools_of: ToolsOf,
        keep: Keep,
        on_drop: Callable[[Dropped], None],
        on_rows: Callable[[int], None],
    ) -> None:
        self.config, self.tokenizer, self.tools_of = config, tokenizer, tools_of
        self.keep, self.on_drop, self.on_rows = keep, on_drop, on_rows
        self.problems: dict[str, Problem] = {}
        self.complete = True
        self._tools = {schema["function"]["name"]: schema for schema in tools_of({})}
        self._held_out: dict[int, str] = {}
        self._trained = Hashes()
        self._given = dict.fromkeys(SPLITS, 0)
        self._seen = self._stopping = self._longest = 0
        self._reported = time.monotonic()

    def guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        """What the call returns, or None when it raises InputError, which then is a problem."""
        try:
            return call(*args)
        except InputError as error:
            self.complete = False
            return self._problem("stop", error)

    def source(self, split: str, label: str, found: Iterable[Found]) -> Tally:
        """Looks at all rows that the source has in the split."""
        tally = Tally(split, label)
        prefix = split if len(self.config.sources) == 1 else f"{split} ({label})"
        self.guarded(self._all, found, tally, prefix)
        return tally

    def amounts(self, tallies: list[Tally], splits: tuple[str, ...]) -> None:
        """Finds splits of too few rows or of too many that were dropped."""
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
            if self._stopping >= MAX_STOPPING_ROWS:
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
        except InputError as error:
            self._fault(tally, "malformed", error)
            return
        tally.lengths[tokens] += 1
        self._warnings(tally, row, where)
        if tokens > self.config.max_prompt_length:
            self._longest = max(self._longest, tokens)
            self._fault(tally, "overlong", rules.overlong(self.config.max_prompt_length, tokens, self._longest, where))
        elif self._fresh(tally, row, where):
            self._keep(tally, row, tokens)

    def _fresh(self, tally: Tally, row: Row, where: str) -> bool:
        """Whether the row stays although others may have its prompt."""
        number = rules.prompt_hash(row)
        same = self._held_out.get(number)
        if tally.split == "train" and same:
            self._fault(tally, "held_out", rules.held_out(same, where))
            return False
        new = self._trained.add(number) if tally.split == "train" else same is None
        if tally.split == "val":
            self._held_out.setdefault(number, where)
        if not new:
            tally.fault("duplicate", f"{where}: the prompt of {same or 'an earlier row'}")
            if "duplicate" in self.config.drop:
                self.on_drop(Dropped(tally.split, where, "duplicate", f"the prompt of {same or 'an earlier row'}"))
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
        """A row that is left out, which stops the run unless `data.drop` has such rows."""
        tally.fault(kind, f"{error.where}: {error.seen}")
        if kind in self.config.drop:
            self.on_drop(Dropped(tally.split, writable(error.where), kind, writable(error.seen)))
            return
        self._stopping += 1
        if kind != "unknown_tool":
            reasons = ",".join(dict.fromkeys([*self.config.drop, kind]))
            error = InputError(
                error.expected,
                error.seen,
                error.where,
                f"{error.fix}, or data.drop=[{reasons}] to leave such rows out",
            )
        self._problem("stop", error)
        if kind == "overlong" and error.expected in self.problems:  # the fix has the longest so far
            self.problems[error.expected] = dataclasses.replace(self.problems[error.expected], fix=error.fix)

    def _problem(self, level: Literal["stop", "warning"], error: InputError) -> None:
        """Keeps the first problem of a kind, which is what was expected, and counts the others."""
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
