"""The report of a run: one self-contained HTML page with scores, curves, samples and settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pyarrow as pa

from rl_core.console import clean, duration
from rl_core.credentials import without_credentials
from rl_core.html.curves import Line, axes_of, column, panel, thin
from rl_core.html.page import COLOURS, STYLE, render_page, to_svg
from rl_core.trainer.rollout_file import rollout_table

MAX_SAMPLES = 20
_PHASES_SHOWN = len(COLOURS)

_FACTS = {
    "name": "Run", "recipe": "Recipe", "model": "Model", "steps": "Steps", "time": "Time",
    "sampled": "Time and curves", "started": "Started",
    "programs": "Programs", "model_version": "Model version", "alias": "Alias", "mlflow_run": "MLflow run",
    "config_hash": "Config hash", "data_hash": "Data hash", "profiles": "Profiles",
    "versions": "Versions",
}  # fmt: skip


@dataclass(frozen=True)
class Chart:
    """A panel: its title, a description, and (metric, legend label) of each line."""

    title: str
    text: str
    series: tuple[tuple[str, str], ...]
    wide: bool = False


CHARTS = (
    Chart(
        "Score and reward",
        "Mean over the responses of a step; reward = score − length and KL penalties.",
        (("score/mean", "score"), ("reward/mean", "reward")),
        wide=True,
    ),
    Chart(
        "Rollout–trainer mismatch",
        "KL between engine and trainer on the same weights, nats per token; healthy near 0.",
        (("kl/rollout_k3", "k3"), ("kl/rollout_k1", "k1")),
    ),
    Chart("KL to the reference", "Distance of the policy from the reference, nats per token.", (("kl/ref", ""),)),
    Chart("Entropy", "Entropy of the policy, nats per token.", (("actor/entropy", ""),)),
    Chart("Response length", "Mean over the responses of a step, tokens.", (("response_length/mean", ""),)),
    Chart(
        "Turns and calls",
        "Mean over the conversations of a step: policy turns, and calls of tools and environment.",
        (("turns/mean", "turns"), ("tools/calls_mean", "calls")),
    ),
    Chart(
        "Failures",
        "Share of calls that returned an error, and of conversations that failed.",
        (("tools/failed_share", "calls"), ("rollout/failed_share", "conversations")),
    ),
    Chart("Gradient norm", "Global L2 norm before clipping.", (("actor/grad_norm", ""),)),
    Chart("Learning rate", "Learning rate of the policy's optimizer.", (("actor/lr", ""),)),
    Chart("Throughput", "Tokens of a step divided by its time, tokens per second.", (("perf/tokens_per_s", ""),)),
)


def render_report(
    run: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    samples: Sequence[Mapping[str, Any]],
    summary: Mapping[str, float | None],
    scoring: Sequence[Mapping[str, Any]] = (),
    notes: Sequence[tuple[str, str]] = (),
) -> str:
    """Renders the page as HTML; sections without data are omitted.

    run: facts by name (`name recipe model steps sampled started programs mlflow_run config_hash data_hash profiles
        model_version alias`), `seconds` (float), `versions` (package → version) and `config`: (key, value, origin) of
        each value that differs from its default.
    records: ledger records, {"step": int, "metrics": {name: number}}; of a long run a sample.
    samples: {"prompt", "ground_truth", "answer_before", "answer_after": str, "score_before", "score_after": 0 to 1}.
    summary: `greedy_before greedy_after sampled_before sampled_after`, scores.
    scoring: rows of `scoring_rows`.
    notes: time and text of each warning of the run.
    """
    with matplotlib.rc_context(STYLE):
        charts = [panel for chart in CHARTS if (panel := _line_panel(chart, records))]
        # The last panel is wide if it would otherwise leave a gap in the two columns.
        half = sum(not panel["wide"] for panel in charts)
        if phases := _phase_panel(records, wide=half % 2 == 0):
            charts.append(phases)
    return render_page(
        "report.html.j2",
        name=clean(str(run.get("name", ""))),
        scores=_headline(summary),
        facts=_facts(run),
        notes=[(when, clean(without_credentials(text))) for when, text in notes],
        charts=charts,
        samples=[_sample(sample) for sample in samples[:MAX_SAMPLES]],
        left_out=max(0, len(samples) - MAX_SAMPLES),
        scoring=[{**row, "data_source": clean(row["data_source"])} for row in scoring],
        config=[(key, clean(without_credentials(str(value))), origin) for key, value, origin in run.get("config", ())],
    )


def total_seconds(records: Sequence[Mapping[str, Any]], steps: int) -> float:
    """Time of all steps in seconds; estimated from the mean if there are fewer records than steps."""
    seconds = [record["metrics"]["time/step"] for record in records]
    return float(sum(seconds) * steps / len(seconds)) if seconds else 0.0


def scoring_rows(rollouts: Sequence[bytes], where: str) -> list[dict[str, Any]]:
    """Scoring statistics by data source over some steps: `data_source`, `responses`, `seconds_mean`, `seconds_max` and
    `failed` (count by status).

    `rollouts` are the parquet files of the steps. Raises InputError if one is damaged or lacks a column.
    """
    columns = ["data_source", "score_status", "score_seconds"]
    tables = [rollout_table(data, columns, where).select(columns) for data in rollouts]
    if not tables:
        return []
    groups = pa.concat_tables(tables).group_by(["data_source", "score_status"])
    counted = groups.aggregate([("score_seconds", each) for each in ("count", "sum", "max")]).to_pylist()
    rows = []
    for source in sorted({each["data_source"] for each in counted}):
        parts = [each for each in counted if each["data_source"] == source]
        count = sum(each["score_seconds_count"] for each in parts)
        rows.append(
            {
                "data_source": source,
                "responses": count,
                "seconds_mean": sum(each["score_seconds_sum"] for each in parts) / count,
                "seconds_max": max(each["score_seconds_max"] for each in parts),
                "failed": {
                    each["score_status"]: each["score_seconds_count"] for each in parts if each["score_status"] != "ok"
                },
            }
        )
    return rows


def _headline(summary: Mapping[str, float | None]) -> list[dict[str, str]]:
    """Before, after and gain of each kind of score, as text."""
    tiles = []
    for kind, text in (
        ("greedy", "greedy answers to the held-out prompts"),
        ("sampled", "sampled answers to the held-out prompts"),
    ):
        before, after = summary.get(f"{kind}_before"), summary.get(f"{kind}_after")
        if after is None:
            continue
        share = _is_share(after) and (before is None or _is_share(before))  # use the same unit for both
        shown = _score if share else "{:.3f}".format
        tile = {"title": f"{kind.capitalize()} score", "text": text, "after": shown(after), "before": "", "gain": ""}
        if before is not None:
            gain = after - before
            points = f"{abs(gain) * 100:.1f} points" if share else f"{abs(gain):.3f}"
            tile |= {"before": shown(before), "gain": f"{'▲' if gain >= 0 else '▼'} {points}"}
            tile["mood"] = "right" if gain >= 0 else "wrong"
        tiles.append(tile)
    return tiles


def _is_share(score: float) -> bool:
    return 0 <= score <= 1


def _score(score: float) -> str:
    return f"{score * 100:.1f} %" if _is_share(score) else f"{score:.3f}"


def _facts(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Title and text of each known fact."""
    known = dict(run)
    if "seconds" in run:
        known["time"] = duration(run["seconds"])
    if "versions" in run:
        known["versions"] = ", ".join(f"{package} {version}" for package, version in run["versions"].items())
    shown = {key: clean(without_credentials(str(value))) for key, value in known.items() if value not in (None, "")}
    return [(title, shown[key]) for key, title in _FACTS.items() if key in shown]


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Cleaned texts and, for before and after, a mark for the score with its colour class."""
    shown: dict[str, Any] = {"prompt": clean(str(sample["prompt"])), "truth": clean(str(sample["ground_truth"]))}
    for when in ("before", "after"):
        answer, score = sample.get(f"answer_{when}"), sample.get(f"score_{when}")
        shown[when] = {"text": "–" if answer is None else clean(str(answer)), "mark": "", "mood": ""}
        if score is not None:
            mark, mood = ("✓", "right") if score >= 1 else ("✗", "wrong") if score <= 0 else ("≈", "partly")
            shown[when] |= {"mark": f"{mark} {score:g}" if mood == "partly" else mark, "mood": mood}
    return shown


def _line_panel(chart: Chart, records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The panel of a chart; None if no record has any of its metrics."""
    lines = [line for metric, label in chart.series if (line := Line.of(records, metric, label))]
    if not lines:
        return None
    return panel(chart.title, chart.text, lines, chart.wide, lines[0].ends)


def _phase_panel(records: Sequence[Mapping[str, Any]], wide: bool) -> dict[str, Any] | None:
    """Stacked seconds per phase of a step; beyond eight phases, the smallest are combined as `other`."""
    names = dict.fromkeys(name for record in records for name in record["metrics"] if name.startswith("time/"))
    phases = {n.removeprefix("time/"): np.nan_to_num(column(records, n)) for n in names if n != "time/step"}
    if not phases:
        return None
    if len(phases) > _PHASES_SHOWN:
        smallest = sorted(phases, key=lambda name: phases[name].sum())[: len(phases) - _PHASES_SHOWN + 1]
        phases["other"] = np.sum([phases.pop(name) for name in smallest], axis=0)
    steps = thin(np.array([float(record["step"]) for record in records]))
    figure, axes = axes_of(wide, steps)
    axes.stackplot(steps, *[thin(v) for v in phases.values()], colors=COLOURS, alpha=0.85, linewidth=0)
    total = np.sum(list(phases.values()), axis=0)
    # A single slow step (the first one compiles) would flatten the rest of the chart.
    axes.set_ylim(0, min(thin(total).max(), 2 * np.median(total)) * 1.08 or 1.0)
    return {
        "title": "Time per phase", "text": "Stacked seconds per step; outliers are cut off.",
        "wide": wide, "legend": [(name.replace("_", " "), i) for i, name in enumerate(phases)],
        "ends": f"median {duration(float(np.median(total)))} per step",
        "svg": to_svg(figure, "Time per phase"),
    }  # fmt: skip
