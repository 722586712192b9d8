"""A run's HTML report and Markdown summary, rendered from its store alone."""

import logging
import re
import time
from collections.abc import Mapping
from typing import Any

from rl_core.config.compose import flatten, from_dict
from rl_core.errors import InputError
from rl_core.storage import run_files
from rl_core.storage.manifest import Json
from rl_core.storage.store import Store
from tasks.runs.run import committed_step, sampled_records

logger = logging.getLogger(__name__)

SCORING_STEPS = 10
"""Number of last steps whose scoring the report describes."""
SCORES = ("greedy", "sampled", "pass_at_k", "maj_at_k")
"""Names of the scores that an evaluation may have."""
_EVALUATION = re.compile(r"step_(\d{6,})\.json")


def evaluations(store: Store) -> tuple[Json | None, Json | None]:
    """The evaluations of step 0 and of the last evaluated step; None for one that does not exist yet."""
    steps = {int(match[1]) for name in store.listdir(run_files.EVALUATION) if (match := _EVALUATION.fullmatch(name))}
    last = max(steps, default=0)
    before = store.read_json(run_files.evaluation(0)) if 0 in steps else None
    return before, store.read_json(run_files.evaluation(last)) if last else None


def scores(store: Store) -> dict[str, tuple[float | None, float | None]]:
    """Each score before and after training."""
    before, after = (result or {} for result in evaluations(store))
    return {name: (before.get(name), after.get(name)) for name in SCORES if name in before | after}


def run_page(store: Store, extra_facts: Mapping[str, Any]) -> str:
    """The report of a run as HTML, from its committed steps.

    `extra_facts` are not in the store: `model_version`, `alias`, `mlflow_run`, `versions`.
    """
    from rl_core.reports.report import render_report, total_seconds  # imports matplotlib

    run, step = store.read_json(run_files.RUN), committed_step(store)
    records = sampled_records(store)
    manifest = store.read_manifest(run_files.DATA)
    config = from_dict(run["config"])
    values, origins = flatten(config), run.get("origins", {})
    facts = {
        "name": run["name"],
        "recipe": run["recipe"],
        "model": config.model.path,
        "steps": step if step == config.trainer.steps else f"{step} of {config.trainer.steps}",
        "seconds": total_seconds(records, step),
        "sampled": f"from {len(records):,} of {step:,} steps" if len(records) < step else None,
        "started": time.strftime("%Y-%m-%d %H:%M", time.localtime(run["created"])),
        "programs": config.reward.code.risk,
        "config_hash": run["config_hash"],
        "profiles": ", ".join(f"{run_files.PROFILE}/{name}" for name in sorted(store.listdir(run_files.PROFILE))),
        "data_hash": manifest["meta"]["data_hash"] if manifest else None,
        "config": [(key, value, origins[key]) for key, value in values.items() if key in origins],
        **extra_facts,
    }
    found = scores(store)
    summary = {f"{name}_{when}": found.get(name, (None, None))[i]
               for name in ("greedy", "sampled") for i, when in enumerate(("before", "after"))}  # fmt: skip
    return render_report(facts, records, _samples(store), summary, _scoring(store, step), _notes(store))


def _notes(store: Store) -> list[tuple[str, str]]:
    notes = store.read_json(run_files.NOTES) if store.exists(run_files.NOTES) else []
    return [(time.strftime("%Y-%m-%d %H:%M", time.localtime(note["time"])), note["text"]) for note in notes]


def _scoring(store: Store, last: int) -> list[dict[str, Any]]:
    from rl_core.reports.report import scoring_rows

    steps = range(max(last - SCORING_STEPS, 0) + 1, last + 1)
    try:
        rollouts = [store.read_bytes(run_files.rollouts(step)) for step in steps]
        return scoring_rows(rollouts, f"{store.url}/rollouts")
    except (FileNotFoundError, InputError) as error:
        logger.warning("The report has no section on scoring. %s", error)
        return []


def _samples(store: Store) -> list[dict[str, Any]]:
    before, after = evaluations(store)
    if not before or not after:
        return []
    return [
        {
            "prompt": old["prompt"],
            "ground_truth": old["ground_truth"],
            "answer_before": old["answer"],
            "answer_after": new["answer"],
            "score_before": old["score"],
            "score_after": new["score"],
        }
        for old, new in zip(before["samples"], after["samples"], strict=True)
    ]


def run_summary(store: Store, links: Mapping[str, str]) -> str:
    """Markdown summary of a run for the MLflow and Prefect pages: recipe, progress, scores, links and warnings.

    `links` maps titles to locations; http(s) addresses become links.
    """
    run = store.read_json(run_files.RUN)
    found = [f"{name} {_three(before)} → {_three(after)}" for name, (before, after) in scores(store).items()]
    lines = [f"- {what}: {f'[{where}]({where})' if where.startswith('http') else f'`{where}`'}"
              for what, where in {"run folder": store.url, **links}.items()]  # fmt: skip
    model, steps = run["config"]["model"]["path"], run["config"]["trainer"]["steps"]
    head = f"Run **{run['name']}** of the recipe `{run['recipe']}`: {committed_step(store)} of {steps} steps"
    return "\n".join(
        [
            *(f"{head}, model `{model}`.", "", f"Held-out scores: {', '.join(found) or 'none yet'}", "", *lines),
            *(f"- {when}: {text}" for when, text in _notes(store)),
        ]
    )


def _three(score: float | None) -> str:
    return "…" if score is None else f"{score:.3f}"
