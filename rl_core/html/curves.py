"""Line charts of metrics over steps, as panels of HTML pages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from rl_core.html.page import COLOURS, to_svg

_MAX_POINTS = 600


@dataclass(frozen=True)
class Line:
    """Values [n] at steps [n], NaN where missing, with a label for the legend."""

    label: str
    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]], metric: str, label: str) -> "Line | None":
        """A metric of ledger records; None if no record has it."""
        values = column(records, metric)
        if not np.isfinite(values).any():
            return None
        return cls(label, np.array([float(record["step"]) for record in records]), values)

    @property
    def first_and_last(self) -> tuple[float, float]:
        """The first and last finite value."""
        first, last = self.values[np.isfinite(self.values)][[0, -1]]
        return float(first), float(last)

    @property
    def ends(self) -> str:
        """The first and last finite value as text."""
        first, last = self.first_and_last
        return f"{self.label} {short(first)} → {short(last)}"


def panel(title: str, text: str, lines: Sequence[Line], wide: bool, ends: str) -> dict[str, Any]:
    """Thin raw and thick smoothed lines, with a legend if there are several; `ends` is shown in the header."""
    figure, axes = axes_of(wide, np.unique(np.concatenate([thin(line.steps) for line in lines])))
    for line, colour in zip(lines, COLOURS, strict=False):
        steps, values = thin(line.steps), thin(line.values)
        axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.4, marker="o" if len(values) == 1 else "")
        axes.plot(steps, _smooth(values), color=colour, linewidth=1.9, solid_capstyle="round")
    axes.margins(y=0.08)
    low, high = axes.get_ylim()
    if high - low > 1000:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    legend = [(line.label, i) for i, line in enumerate(lines)] if len(lines) > 1 else []
    return {"title": title, "text": text, "wide": wide, "legend": legend, "ends": ends, "svg": to_svg(figure, title)}


def column(records: Sequence[Mapping[str, Any]], metric: str) -> np.ndarray:
    """Values of one metric [len(records)], NaN where a record lacks it or it is not finite."""
    values = np.array([float(record["metrics"].get(metric, math.nan)) for record in records])
    return np.where(np.isfinite(values), values, math.nan) if len(values) else values


def thin(values: np.ndarray) -> np.ndarray:
    """At most 600 values, each the mean of consecutive values, to limit the page size of long runs."""
    if len(values) <= _MAX_POINTS:
        return values
    return np.array([_mean(part) for part in np.array_split(values, _MAX_POINTS)])


def short(value: float) -> str:
    """A value formatted compactly."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def axes_of(wide: bool, steps: np.ndarray) -> tuple[Figure, Axes]:
    """A figure and its axes, with steps on the x axis."""
    figure = Figure(figsize=(10.8, 2.3) if wide else (5.3, 2.1), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if len(steps) > 1:
        axes.set_xlim(steps[0], steps[-1])
    return figure, axes


def _mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving mean over about a fifteenth of the points."""
    half = max(1, len(values) // 30)
    return np.array([_mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))])
