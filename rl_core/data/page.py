"""HTML page of a data check."""

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
    """The page as HTML text; `name` is the title, naming the rows."""
    splits = [split for split in SPLITS if report.of(split)]
    faults = [kind for kind in _FAULTS if any(kind in rows.faults for rows in report.rows)]
    with matplotlib.rc_context(STYLE):
        charts = [_chart(report, split, wide=len(splits) == 1) for split in splits]
    return render_page(
        "data.html.j2",
        name=clean(name),
        facts=_facts(report),
        problems=[_problem(problem) for problem in report.problems],
        faults=[kind.replace("_", " ") for kind in faults],
        rows=[_line(SPLITS[split], rows, faults) for split in splits for rows in report.of(split)],
        examples=[
            (SPLITS[split], rows.source, kind.replace("_", " "), clean(text))
            for split in splits for rows in report.of(split) for kind, text in rows.examples.items()
        ],
        charts=[chart for chart in charts if chart],
        bars=[
            ("Data sources", "Kept rows by data_source.", _bars(report.data_sources)),
            ("Tools", "Rows that select the tool.", _bars(total(rows.tools for rows in report.rows))),
            ("Messages per prompt", "Rows by number of messages.", _bars(_turns(report))),
        ],
        columns=[tuple(map(clean, column)) for column in columns_of(report)],
        samples=[(SPLITS[split], rows.source, [_sample(sample) for sample in rows.samples])
                 for split in splits for rows in report.of(split) if rows.samples],
    )  # fmt: skip


def _facts(report: DataReport) -> list[tuple[str, str]]:
    splits = [split for split in SPLITS if report.of(split)]
    facts = [(SPLITS[split], f"{report.kept(split):,} of {report.seen(split):,} kept") for split in splits]
    missing = sum(rows.missing_truth for rows in report.rows)
    facts += [("Ground truth", f"missing in {missing:,} rows")] if missing else []
    facts += [("Tokenizer", report.tokenizer), ("Time", report.pace)]
    facts += [("Prompts", f"at most {report.max_prompt_length:,} tokens (data.max_prompt_length)")]
    return facts if report.complete else [*facts, ("Incomplete", "the check stopped before all rows were read")]


def _problem(problem: Problem) -> dict[str, str]:
    texts = {name: clean(getattr(problem, name)) for name in ("expected", "seen", "where", "fix")}
    stops = problem.level == "stop"
    mood, word = ("wrong", "Blocks a run") if stops else ("partly", "Warning")
    return texts | {"mood": mood, "word": word, "rows": in_rows(problem.rows) if problem.rows > 1 else ""}


def _line(split: str, rows: RowsReport, faults: list[str]) -> list[str]:
    return [split, rows.source, *(f"{count:,}" for count in (rows.seen, rows.kept)),
            *(f"{rows.faults.get(kind, 0):,}" for kind in faults)]  # fmt: skip


def _turns(report: DataReport) -> dict[str, int]:
    return total({str(turns): count for turns, count in rows.turns.items()} for rows in report.rows)


def _bars(counts: dict[str, int], shown: int = 30) -> list[tuple[str, str, str]]:
    """Name, count and length in percent of each bar, largest first; entries beyond `shown` are merged into one."""
    items = list(counts.items())
    if len(items) > shown:
        items = [*items[:shown], (f"{len(items) - shown} others", sum(count for _, count in items[shown:]))]
    largest = max((count for _, count in items), default=1)
    return [(clean(name), f"{count:,}", f"{100 * count / largest:.1f}") for name, count in items]


def _sample(sample: Sample) -> dict[str, str]:
    return {name: clean(getattr(sample, name)) for name in ("data_source", "prompt", "ground_truth", "more")}


def _chart(report: DataReport, split: str, wide: bool) -> dict[str, Any] | None:
    """Histogram of a split's prompt lengths, one colour per source; None if there are none."""
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
