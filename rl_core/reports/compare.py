"""Comparison of two runs: differing settings, scores, and curves of the metrics both runs have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

from rl_core.config.compose import diff, layout_diff
from rl_core.config.problems import show
from rl_core.config.schema import RunConfig
from rl_core.console import clean, duration
from rl_core.html.curves import Line, panel, short
from rl_core.html.page import STYLE, render_page
from rl_core.reports.report import CHARTS, total_seconds

Row = tuple[str, str, str]
"""Name of the quantity, and the values of both runs."""


@dataclass(frozen=True)
class Side:
    """One of the two runs: latest held-out scores by name, number of steps, and ledger records of them."""

    name: str
    config: RunConfig
    scores: Mapping[str, float]
    steps: int
    records: Sequence[Mapping[str, Any]]

    @property
    def seconds(self) -> float:
        """Total time of all steps."""
        return total_seconds(self.records, self.steps)


def setting_rows(first: Side, second: Side) -> list[Row]:
    """Settings that differ between the runs."""
    a, b = first.config, second.config
    return [(key, show(ours), show(theirs)) for key, (ours, theirs) in (diff(a, b) | layout_diff(a, b)).items()]


def score_rows(first: Side, second: Side) -> list[Row]:
    """Number of steps, their total time, and the held-out scores."""
    names = list(dict.fromkeys([*first.scores, *second.scores]))
    return [
        ("steps", f"{first.steps}", f"{second.steps}"),
        *_sampled(first, second),
        ("time of the steps", duration(first.seconds), duration(second.seconds)),
        *((name, _score(first, name), _score(second, name)) for name in names),
    ]


def metric_rows(first: Side, second: Side) -> list[Row]:
    """First and last value of each metric in the report's charts that both runs have."""
    return [(metric, _ends(a), _ends(b)) for _, _, metric, (a, b) in _common(first, second)]


def render_comparison(first: Side, second: Side) -> str:
    """Renders the page as HTML, with one panel per metric showing the curves of both runs."""
    with matplotlib.rc_context(STYLE):
        charts = [
            panel(title, text, lines, False, " · ".join(short(line.first_and_last[1]) for line in lines))
            for title, text, _, lines in _common(first, second)
        ]
    settings = setting_rows(first, second)
    tables = [
        ("Settings that differ", "" if settings else "None: both runs use the same settings.", settings),
        ("Scores", "On held-out rows, at the last evaluated step.", score_rows(first, second)),
    ]
    return render_page(
        "compare.html.j2",
        names=[clean(first.name), clean(second.name)],
        tables=[(title, text, [tuple(map(clean, row)) for row in rows]) for title, text, rows in tables],
        charts=charts,
    )


def _common(first: Side, second: Side) -> list[tuple[str, str, str, tuple[Line, Line]]]:
    """Title, text, metric and the two lines of each metric that both runs have."""
    found = []
    for chart in CHARTS:
        for metric, label in chart.series:
            a, b = (Line.of(side.records, metric, clean(side.name)) for side in (first, second))
            if a and b:
                title = f"{chart.title}: {label}" if len(chart.series) > 1 else chart.title
                found.append((title, chart.text, metric, (a, b)))
    return found


def _sampled(first: Side, second: Side) -> list[Row]:
    """The number of records of each run, if one of them has fewer records than steps."""
    a, b = len(first.records), len(second.records)
    return [] if (a, b) == (first.steps, second.steps) else [("steps in time and curves", f"{a}", f"{b}")]


def _ends(line: Line) -> str:
    return " → ".join(map(short, line.first_and_last))


def _score(side: Side, name: str) -> str:
    return f"{side.scores[name]:.3f}" if name in side.scores else "–"
