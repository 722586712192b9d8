"""Results of a data check: counts, lengths, samples and problems, and their text form."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from rl_core.console import duration
from rl_core.errors import InputError


@dataclass(frozen=True)
class Problem:
    """A problem of the rows: level `stop` prevents a run from starting, `warning` does not.

    `rows` is the number of rows with this problem; seen, where and fix refer to the first.
    """

    level: Literal["stop", "warning"]
    expected: str
    seen: str
    where: str
    fix: str
    rows: int = 1

    @property
    def error(self) -> InputError:
        """The problem as an InputError."""
        more = f" ({in_rows(self.rows)} of this kind)" if self.rows > 1 else ""
        return InputError(self.expected, self.seen + more, self.where, self.fix)


@dataclass(frozen=True)
class Lengths:
    """Prompt lengths in tokens; bin i counts `bin_width` lengths from `minimum + i * bin_width` on."""

    minimum: int
    mean: float
    median: int
    p95: int
    maximum: int
    bin_width: int
    bins: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """A row as text."""

    data_source: str
    prompt: str
    ground_truth: str
    more: str


@dataclass(frozen=True)
class RowsReport:
    """Results for the rows of one source in one split; dicts count rows by name."""

    split: str
    source: str
    seen: int
    kept: int
    faults: dict[str, int]
    """Rows by kind: malformed, overlong, duplicate, held_out, unknown_tool, not_scored. `kept` excludes all of these,
    but duplicates only if data.drop lists them."""
    examples: dict[str, str]
    """The first row of each kind of fault: where it is and what was seen."""
    columns: dict[str, dict[str, int]]
    """Rows by type for each column, and for each field of its structs as `column.field`; missing values are null."""
    data_sources: dict[str, int]
    """Kept rows by data_source."""
    tools: dict[str, int]
    unknown_tools: dict[str, int]
    turns: dict[int, int]
    """Rows by number of messages in the prompt."""
    missing_truth: int
    lengths: Lengths | None
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class DataReport:
    """Results for all rows; not `complete` if the check stopped early or a file could not be read."""

    tokenizer: str
    max_prompt_length: int
    drop: tuple[str, ...]
    complete: bool
    seconds: float
    rows: tuple[RowsReport, ...]
    problems: tuple[Problem, ...]

    def of(self, split: str) -> list[RowsReport]:
        """The reports of the split, one per source, in the order of the sources."""
        return [each for each in self.rows if each.split == split]

    def seen(self, split: str) -> int:
        """Number of rows read in the split."""
        return sum(each.seen for each in self.of(split))

    def kept(self, split: str) -> int:
        """Number of rows kept in the split."""
        return sum(each.kept for each in self.of(split))

    def dropped(self, split: str) -> dict[str, int]:
        """Rows of the split dropped according to `data.drop`, by reason."""
        counts = total(each.faults for each in self.of(split))
        return {reason: counts[reason] for reason in self.drop if counts.get(reason)}

    @property
    def data_sources(self) -> dict[str, int]:
        """Kept rows of both splits by data_source."""
        return total(each.data_sources for each in self.rows)

    @property
    def stops(self) -> list[Problem]:
        """The problems that prevent a run from starting."""
        return [problem for problem in self.problems if problem.level == "stop"]

    @property
    def pace(self) -> str:
        """Duration and rate of the check as text."""
        seen = sum(each.seen for each in self.rows)
        return f"{duration(self.seconds)}, {seen / max(self.seconds, 1e-9):,.0f} rows/s"

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        value: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "DataReport":
        """Inverse of `as_json`."""
        return _ADAPTER.validate_python(value)


_ADAPTER = TypeAdapter(DataReport)


def total(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Sums of several counts by name, largest first."""
    summed: Counter[str] = Counter()
    for each in counts:
        summed.update(each)
    return dict(summed.most_common())


def in_rows(count: int) -> str:
    """A number of rows as text: `1 row`, `1,024 rows`."""
    return f"{count:,} row" + ("" if count == 1 else "s")


def counted(counts: dict[str, int]) -> str:
    """Counts as text: `overlong 10, duplicate 2`."""
    return ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items())


def described(lengths: Lengths) -> str:
    """The lengths as text: `4 to 11, mean 6.3, median 4, 95 % up to 11`."""
    spread = f"mean {lengths.mean:,.1f}, median {lengths.median:,}, 95 % up to {lengths.p95:,}"
    return f"{lengths.minimum:,} to {lengths.maximum:,}, {spread}"


def columns_of(report: DataReport) -> list[tuple[str, str, str]]:
    """Name, types and share of missing values of each column; the share is empty if none is missing."""
    checked = {id(rows): sum(rows.turns.values()) for rows in report.rows}
    lines = []
    for name in dict.fromkeys(name for rows in report.rows for name in rows.columns):
        types = total(rows.columns.get(name, {"null": checked[id(rows)]}) for rows in report.rows)
        nulls = types.pop("null", 0)
        kinds = " or ".join(f"{kind} ({count:,})" if len(types) > 1 else kind for kind, count in types.items())
        lines.append((name, kinds or "nothing", f"{nulls / sum(checked.values()):.1%}" if nulls else ""))
    return lines
