"""Counts over rows in bounded memory, whatever their number and contents."""

import bisect
import json
from collections import Counter
from collections.abc import Collection
from typing import Any

import numpy as np

from rl_core.data.report import Lengths, RowsReport, Sample
from rl_core.data.rows import Row
from rl_core.runtime.process_pool import writable

MAX_NAMES = 200
"""Maximum distinct names counted; further ones count as `OTHERS`."""
OTHERS = "…"
SAMPLES = 3
MAX_BINS = 40
_MAX_TEXT = 2000
_RECENT = 1024


class Names(Counter[str]):
    """Counter with a bounded number of distinct names; the rest count as OTHERS."""

    def count(self, name: str) -> None:
        """Adds one to the count of the name."""
        if name not in self:  # fast path: most names are known
            name = writable(name[:200])
            name = name if name in self or len(self) < MAX_NAMES else OTHERS
        self[name] += 1


class Hashes:
    """A set of 64-bit integers: about 8 bytes each plus 25 MB for recent ones, a tenth of a Python set."""

    def __init__(self) -> None:
        self._sorted = [np.empty(0, np.uint64) for _ in range(256)]
        self._recent: list[set[int]] = [set() for _ in range(256)]

    def add(self, number: int) -> bool:
        """Adds the number; returns whether it is new."""
        old, recent = self._sorted[number >> 56], self._recent[number >> 56]
        if number in recent:
            return False
        i = int(old.searchsorted(np.uint64(number)))
        if i < len(old) and int(old[i]) == number:
            return False
        recent.add(number)
        if len(recent) == _RECENT:
            new = np.fromiter(recent, np.uint64, len(recent))
            self._sorted[number >> 56] = np.sort(np.concatenate([old, new]), kind="stable")
            recent.clear()
        return True


class Tally:
    """Counts over the rows of one source in one split."""

    def __init__(self, split: str, source: str) -> None:
        self.split, self.source = split, source
        self.seen = self.kept = self.missing_truth = 0
        self.faults: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.lengths: Counter[int] = Counter()
        self.turns: Counter[int] = Counter()
        self._rows = 0
        self._types: dict[str, Counter[str]] = {}
        self._data_sources, self._tools, self._unknown_tools = Names(), Names(), Names()
        self._samples: list[Sample] = []

    def fault(self, kind: str, example: str) -> None:
        """Counts a row with this kind of fault."""
        self.faults[kind] += 1
        self.examples.setdefault(kind, clipped(example, 500))

    def look(self, row: Row, known_tools: Collection[str]) -> None:
        """Counts the row's contents, whether or not it is kept."""
        self._rows += 1
        for name, value in row.items():
            self._count_type(name, value)
            if isinstance(value, dict):
                for field, inner in value.items():
                    self._count_type(f"{name}.{field}", inner)
        self.turns[len(row["prompt"])] += 1
        for name in chosen_tools(row):
            self._tools.count(name)
            if name not in known_tools:
                self._unknown_tools.count(name)
        if len(self._samples) < SAMPLES:
            self._samples.append(_sample(row))

    def keep(self, row: Row) -> None:
        """Counts a kept row."""
        self.kept += 1
        self._data_sources.count(str(row["data_source"]))

    def report(self) -> RowsReport:
        """The current counts."""
        return RowsReport(
            split=self.split,
            source=self.source,
            seen=self.seen,
            kept=self.kept,
            faults=dict(self.faults),
            examples=self.examples,
            columns={name: self._with_nulls(types) for name, types in self._types.items()},
            data_sources=dict(self._data_sources.most_common()),
            tools=dict(self._tools.most_common()),
            unknown_tools=dict(self._unknown_tools.most_common()),
            turns=dict(sorted(self.turns.items())),
            missing_truth=self.missing_truth,
            lengths=_lengths(self.lengths),
            samples=tuple(self._samples),
        )

    def _count_type(self, name: str, value: Any) -> None:
        types = self._types.get(name)
        if types is None:
            name = writable(name[:200])
            if name not in self._types and len(self._types) >= MAX_NAMES:
                return
            types = self._types.setdefault(name, Counter())
        types[_type(value)] += 1

    def _with_nulls(self, types: Counter[str]) -> dict[str, int]:
        named = {name: count for name, count in types.most_common() if name != "null"}
        nulls = self._rows - sum(named.values())
        return {**named, **({"null": nulls} if nulls else {})}


def chosen_tools(row: Row) -> list[str]:
    """Names of the tools that the row selects."""
    chosen = (row.get("extra_info") or {}).get("tools_kwargs")
    return [str(name) for name, kwargs in chosen.items() if kwargs is not None] if isinstance(chosen, dict) else []


def clipped(text: str, length: int = _MAX_TEXT) -> str:
    """The text truncated to `length` characters and made writable."""
    return writable(text if len(text) <= length else f"{text[:length]} … ({len(text) - length:,} more characters)")


def _type(value: Any) -> str:
    # Data-frame tools write missing values as NaN.
    if value is None or (isinstance(value, float) and value != value):
        return "null"
    kinds = {bool: "true/false", str: "text", int: "number", float: "number", dict: "struct", list: "list"}
    return kinds.get(type(value), type(value).__name__)


def _sample(row: Row) -> Sample:
    prompt = "\n".join(f"{message['role']}: {message['content']}" for message in row["prompt"])
    more = {name: value for name, value in row.items() if name not in ("data_source", "prompt", "reward_model")}
    truth = (row.get("reward_model") or {}).get("ground_truth")
    text = json.dumps(more, ensure_ascii=False, default=str)
    return Sample(clipped(str(row["data_source"])), clipped(prompt), clipped(str(truth)), clipped(text))


def _lengths(counts: Counter[int]) -> Lengths | None:
    if not counts:
        return None
    values = sorted(counts)
    upto = np.cumsum([counts[value] for value in values]).tolist()
    rows, low, high = upto[-1], values[0], values[-1]
    width = max(1, -(-(high - low + 1) // MAX_BINS))
    bins = [0] * ((high - low) // width + 1)
    for value in values:
        bins[(value - low) // width] += counts[value]

    def quantile(share: float) -> int:
        return values[bisect.bisect_left(upto, share * rows)]

    mean = sum(value * count for value, count in counts.items()) / rows
    return Lengths(low, mean, quantile(0.5), quantile(0.95), high, width, tuple(bins))
