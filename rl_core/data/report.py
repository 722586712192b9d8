"""What a look at the rows has found: counts, lengths, samples and problems, as a person or a file reads them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from rl_core.console import duration
from rl_core.errors import InputError


@dataclass(frozen=True)
class Problem:
    """Something wrong with the rows: `stop` keeps a run from starting, `warning` does not.

    `rows` is how many rows have the like; seen, where and fix are those of the first.
    """

    level: Literal["stop", "warning"]
    expected: str
    seen: str
    where: str
    fix: str
    rows: int = 1

    @property
    def error(self) -> InputError:
        """The problem as the error that a run ends with."""
        more = f" ({in_rows(self.rows)} of this kind)" if self.rows > 1 else ""
        return InputError(self.expected, self.seen + more, self.where, self.fix)


@dataclass(frozen=True)
class Lengths:
    """Lengths of prompts in tokens; bin i counts those from `minimum + i * bin_width` on."""

    minimum: int
    mean: float
    median: int
    p95: int
    maximum: int
    bin_width: int
    bins: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """A row in texts."""

    data_source: str
    prompt: str
    ground_truth: str
    more: str


@dataclass(frozen=True)
class RowsReport:
    """What was found in the rows of one source in one split; dicts count rows by name."""

    split: str
    source: str
    seen: int
    kept: int
    faults: dict[str, int]
    """By kind: malformed, overlong, duplicate, held_out, unknown_tool. All but duplicates are left out of `kept`, and
    these too where data.drop has them."""
    examples: dict[str, str]
    """The first row of each kind of fault: where it is and what was seen."""
    columns: dict[str, dict[str, int]]
    """For each column, and each field of its structs as `column.field`, rows by type; what is missing is null."""
    data_sources: dict[str, int]
    """Of the rows that stay."""
    tools: dict[str, int]
    unknown_tools: dict[str, int]
    turns: dict[int, int]
    """By number of messages in the prompt."""
    missing_truth: int
    lengths: Lengths | None
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class DataReport:
    """What was found in all rows. Where it is not `complete`, the look was ended early or a file could not be read."""

    tokenizer: str
    max_prompt_length: int
    drop: tuple[str, ...]
    complete: bool
    seconds: float
    rows: tuple[RowsReport, ...]
    problems: tuple[Problem, ...]

    def of(self, split: str) -> list[RowsReport]:
        """The reports of the split, one a source, in the order of the sources."""
        return [each for each in self.rows if each.split == split]

    def seen(self, split: str) -> int:
        """Rows of the split."""
        return sum(each.seen for each in self.of(split))

    def kept(self, split: str) -> int:
        """Rows of the split that stay."""
        return sum(each.kept for each in self.of(split))

    def dropped(self, split: str) -> dict[str, int]:
        """Rows of the split that `data.drop` has left out, by reason."""
        counts = total(each.faults for each in self.of(split))
        return {reason: counts[reason] for reason in self.drop if counts.get(reason)}

    @property
    def data_sources(self) -> dict[str, int]:
        """Rows of both splits that stay, by their data_source."""
        return total(each.data_sources for each in self.rows)

    @property
    def stops(self) -> list[Problem]:
        """The problems that keep a run from starting."""
        return [problem for problem in self.problems if problem.level == "stop"]

    @property
    def pace(self) -> str:
        """How long it took, in words."""
        seen = sum(each.seen for each in self.rows)
        return f"{duration(self.seconds)}, {seen / max(self.seconds, 1e-9):,.0f} rows/s"

    def as_json(self) -> dict[str, Any]:
        """The report as values that JSON has."""
        value: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "DataReport":
        """The report that `as_json` was called on."""
        return _ADAPTER.validate_python(value)


_ADAPTER = TypeAdapter(DataReport)


def total(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """The sums of several counts by name, largest first."""
    summed: Counter[str] = Counter()
    for each in counts:
        summed.update(each)
    return dict(summed.most_common())


def in_rows(count: int) -> str:
    """A count of rows in words: `1 row`, `1,024 rows`."""
    return f"{count:,} row" + ("" if count == 1 else "s")


def counted(counts: dict[str, int]) -> str:
    """Counts in words: `overlong 10, duplicate 2`."""
    return ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items())


def described(lengths: Lengths) -> str:
    """The lengths in words: `4 to 11, mean 6.3, median 4, 95 % up to 11`."""
    spread = f"mean {lengths.mean:,.1f}, median {lengths.median:,}, 95 % up to {lengths.p95:,}"
    return f"{lengths.minimum:,} to {lengths.maximum:,}, {spread}"


def columns_of(report: DataReport) -> list[tuple[str, str, str]]:
    """Of each column its name, its types and the share of rows that lack it, empty when none does."""
    looked = {id(rows): sum(rows.turns.values()) for rows in report.rows}
    lines = []
    for name in dict.fromkeys(name for rows in report.rows for name in rows.columns):
        types = total(rows.columns.get(name, {"null": looked[id(rows)]}) for rows in report.rows)
        nulls = types.pop("null", 0)
        kinds = " or ".join(f"{kind} ({count:,})" if len(types) > 1 else kind for kind, count in types.items())
        lines.append((name, kinds or "nothing", f"{nulls / sum(looked.values()):.1%}" if nulls else ""))
    return lines
