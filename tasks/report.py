"""Stage: the run's report as one HTML file in its folder and in MLflow, and what the servers' pages say of the run."""

from typing import Any

from rl_core.storage import run_files
from tasks.runs.report_page import described, run_page, scores
from tasks.runs.run import package_versions
from tasks.session.session import Session
from tasks.stage import stage


@stage("report")
def report(session: Session, facts: dict[str, Any]) -> str:
    """Writes the page of the run, whose model version and aliases are among the facts; returns where it is."""
    others = {
        "model_version": facts["version"],
        "alias": ", ".join(facts["aliases"]),
        "mlflow_run": session.tracking.tracker.run_id,
        "versions": package_versions(),
    }
    page = run_page(session.store, others)
    session.store.write_bytes(run_files.REPORT, page.encode())
    session.tracking.tracker.log_file(page, run_files.REPORT)
    local = session.store.local_path(run_files.REPORT)
    address = str(local) if local else f"{session.run.url}/{run_files.REPORT}"
    _publish(session, {"report": address, **_links(session, facts["version"])})
    return address


def _publish(session: Session, links: dict[str, str]) -> None:
    """The summary goes to MLflow's page of the run and, with the scores, to Prefect's of the flow run."""
    text = described(session.store, links)
    session.tracking.tracker.describe(text)
    session.telemetry.pages.markdown("summary", text, f"Run {session.run.name}: scores and links")
    found = scores(session.store)
    rows = [{"score": name, "before": before, "after": after} for name, (before, after) in found.items()]
    session.telemetry.pages.table("scores", rows, f"Held-out scores of run {session.run.name}")


def _links(session: Session, version: str) -> dict[str, str]:
    name = session.config.registry.model_name
    version_page = f"{session.tracking.uri}/#/models/{name}/versions/{version}"
    served = session.tracking.uri.startswith("http")
    return {
        "MLflow run": session.tracking.tracker.page if served else session.tracking.tracker.run_id,
        "model version": version_page if served else f"{name} {version}",
    }
