"""The page of a look at the rows: one HTML file for people to read."""

from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from rl_core.console import clean
from rl_core.data.report import DataReport, Problem, RowsReport, Sample, columns_of, described, in_rows, total
from rl_core.html.page import COLOURS, STYLE, render_page, to_svg

SPLITS = {"train": "Training rows", "val": "Held-out rows"}
_FAULTS = ("malformed", "overlong", "duplicate", "held_out", "unknown_tool")


def render_data_report(report: DataReport, name: str) -> str:
    """The page as HTML text; `name` says whose rows these are."""
    looked = [split for split in SPLITS if report.of(split)]
    faults = [kind for kind in _FAULTS if any(kind in rows.faults for rows in report.rows)]
    with matplotlib.rc_context(STYLE):
        charts = [_chart(report, split, wide=len(looked) == 1) for split in looked]
    return render_page(
        "data.html.j2",
        name=clean(name),
        facts=_facts(report),
        problems=[_problem(problem) for problem in report.problems],
        faults=[kind.replace("_", " ") for kind in faults],
        rows=[_line(SPLITS[split], rows, faults) for split in looked for rows in report.of(split)],
        examples=[
            (SPLITS[split], rows.source, kind.replace("_", " "), clean(text))
            for split in looked for rows in report.of(split) for kind, text in rows.examples.items()
        ],
        charts=[chart for chart in charts if chart],
        bars=[
            ("Data sources", "Rows that stay, by what scores them.", _bars(report.data_sources)),
            ("Tools", "Rows that choose the tool for their policy.", _bars(total(rows.tools for rows in report.rows))),
            ("Messages of the prompts", "Rows by the number of messages.", _bars(_turns(report))),
        ],
        columns=[tuple(map(clean, column)) for column in columns_of(report)],
        samples=[(SPLITS[split], rows.source, [_sample(sample) for sample in rows.samples])
                 for split in looked for rows in report.of(split) if rows.samples],
    )  # fmt: skip


def _facts(report: DataReport) -> list[tuple[str, str]]:
    looked = [split for split in SPLITS if report.of(split)]
    known = [(SPLITS[split], f"{report.kept(split):,} of {report.seen(split):,} stay") for split in looked]
    missing = sum(rows.missing_truth for rows in report.rows)
    known += [("No truth", f"{missing:,} rows without ground truth")] if missing else []
    known += [("Tokens are of", report.tokenizer), ("Time", report.pace)]
    known += [("Prompts", f"at most {report.max_prompt_length:,} tokens (data.max_prompt_length)")]
    return known if report.complete else [*known, ("Not complete", "the look ended before all rows were seen")]


def _problem(problem: Problem) -> dict[str, str]:
    texts = {name: clean(getattr(problem, name)) for name in ("expected", "seen", "where", "fix")}
    stops = problem.level == "stop"
    mood, word = ("wrong", "Stops a run") if stops else ("partly", "Warning")
    return texts | {"mood": mood, "word": word, "rows": in_rows(problem.rows) if problem.rows > 1 else ""}


def _line(split: str, rows: RowsReport, faults: list[str]) -> list[str]:
    return [split, rows.source, *(f"{count:,}" for count in (rows.seen, rows.kept)),
            *(f"{rows.faults.get(kind, 0):,}" for kind in faults)]  # fmt: skip


def _turns(report: DataReport) -> dict[str, int]:
    return total({str(turns): count for turns, count in rows.turns.items()} for rows in report.rows)


def _bars(counts: dict[str, int], shown: int = 30) -> list[tuple[str, str, str]]:
    """Name, count and length in percent of each bar, largest first; those beyond `shown` are one."""
    items = list(counts.items())
    if len(items) > shown:
        items = [*items[:shown], (f"{len(items) - shown} others", sum(count for _, count in items[shown:]))]
    largest = max((count for _, count in items), default=1)
    return [(clean(name), f"{count:,}", f"{100 * count / largest:.1f}") for name, count in items]


def _sample(sample: Sample) -> dict[str, str]:
    return {name: clean(getattr(sample, name)) for name in ("data_source", "prompt", "ground_truth", "more")}


def _chart(report: DataReport, split: str, wide: bool) -> dict[str, Any] | None:
    """The lengths of a split's prompts, a colour for each source; None without any."""
    parts = [(rows.source, rows.lengths) for rows in report.of(split) if rows.lengths]
    if not parts:
        return None
    figure = Figure(figsize=(10.8, 2.3) if wide else (5.3, 2.1), layout="constrained")
    axes = figure.add_subplot()
    for i, (_, lengths) in enumerate(parts):
        starts = [lengths.minimum + k * lengths.bin_width - 0.5 for k in range(len(lengths.bins) + 1)]
        colour = COLOURS[i % len(COLOURS)]
        axes.stairs(lengths.bins, starts, fill=True, color=colour, alpha=0.75 if len(parts) == 1 else 0.5)
    longest = max(lengths.maximum for _, lengths in parts)
    text = described(parts[0][1]) if len(parts) == 1 else ""
    if longest > 0.6 * report.max_prompt_length:
        axes.axvline(report.max_prompt_length + 0.5, color="#010101", linewidth=1, linestyle="--")
        text += "; dashed: data.max_prompt_length"
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    title = f"Prompt lengths, {SPLITS[split].lower()}"
    return {
        "title": title,
        "wide": wide,
        "legend": [(clean(name), i % len(COLOURS)) for i, (name, _) in enumerate(parts)] if len(parts) > 1 else [],
        "ends": text.removeprefix("; "),
        "svg": to_svg(figure, title),
    }  # fmt: skip
