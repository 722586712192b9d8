"""Stage: writes the HTML report to the run's folder and to MLflow, and its summary to the MLflow and Prefect pages."""

from typing import Any

from rl_core.storage import run_files
from tasks.runs.report_page import run_page, run_summary, scores
from tasks.runs.run import package_versions
from tasks.session.session import Session
from tasks.stage import stage


@stage("report")
def report(session: Session, facts: dict[str, Any]) -> str:
    """Writes the report and returns its location; `facts` has `version` and `aliases` of the registered model."""
    extra_facts = {
        "model_version": facts["version"],
        "alias": ", ".join(facts["aliases"]),
        "mlflow_run": session.tracking.tracker.run_id,
        "versions": package_versions(),
    }
    page = run_page(session.store, extra_facts)
    session.store.write_bytes(run_files.REPORT, page.encode())
    session.tracking.tracker.log_file(page, run_files.REPORT)
    local = session.store.local_path(run_files.REPORT)
    address = str(local) if local else f"{session.run.url}/{run_files.REPORT}"
    _publish(session, {"report": address, **_links(session, facts["version"])})
    return address


def _publish(session: Session, links: dict[str, str]) -> None:
    """Sends the summary to the run's MLflow page and, with the scores, to the flow run's Prefect page."""
    text = run_summary(session.store, links)
    session.tracking.tracker.set_description(text)
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
