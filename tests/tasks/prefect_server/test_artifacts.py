"""A real Prefect server shows a flow run's lines, progress, tables and links; trouble with it fails no run."""

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prefect import flow, task
from prefect.artifacts import Artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from tasks.prefect_server import artifacts as prefect_pages
from tasks.prefect_server.artifacts import PrefectPages


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=600):
        yield


def inside_a_flow(act: object) -> str:
    """Calls the function in a task, as a stage does; returns the id of the flow run."""

    @task
    def stage() -> None:
        act()  # type: ignore[operator]

    @flow
    def run() -> str:
        stage()
        context = FlowRunContext.get()
        assert context and context.flow_run
        return str(context.flow_run.id)

    return str(run())


def logged(flow_run: str) -> list[str]:
    wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run]))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with get_client(sync_client=True) as client:
            found = [log.message for log in client.read_logs(wanted) if log.name == "rollforward.lines"]
        if found:
            return found
        time.sleep(0.3)
    return []


def test_lines_progress_tables_and_texts_are_on_the_page(server: None, capsys: pytest.CaptureFixture[str]) -> None:
    def act() -> None:
        pages = PrefectPages("My_run.2")
        pages.log_line("▸ train")
        pages.log_line("")
        for step in range(1, 5):
            pages.progress(step, 4, f"step {step}")
        pages.table("scores", [{"score": "greedy", "after": 0.5}], "Scores")
        pages.markdown("summary", "# done", "Summary")

    flow_run = inside_a_flow(act)
    assert logged(flow_run) == ["▸ train"]
    assert "▸ train" not in "".join(capsys.readouterr())  # the console has printed it already
    found: dict[str, Any] = {name: Artifact.get(f"my-run-2-{name}") for name in ("progress", "scores", "summary")}
    assert all(artifact and str(artifact.flow_run_id) == flow_run for artifact in found.values())
    progress, scores, summary = (artifact for artifact in found.values() if artifact)
    assert (progress.type, progress.data, progress.description) == ("progress", 100.0, "step 4")
    assert "greedy" in str(scores.data) and summary.data == "# done"


def test_progress_is_sent_every_few_seconds_and_at_the_end(server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[float] = []

    def created(value: float, **_: Any) -> str:
        sent.append(value)
        return "id"

    monkeypatch.setattr(prefect_pages, "create_progress_artifact", created)
    monkeypatch.setattr(prefect_pages, "update_progress_artifact", lambda _, value, **__: sent.append(value))
    pages = PrefectPages("run")
    for step in range(1, 101):
        pages.progress(step, 100, "")
    assert sent == [1.0, 100.0]


def test_a_failing_server_is_left_alone(
    server: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    def fail(markdown: str, key: str, description: str) -> None:
        calls.append(key)
        raise ConnectionError("secret")

    monkeypatch.setattr(prefect_pages, "create_markdown_artifact", fail)
    pages = PrefectPages("run")
    with caplog.at_level(logging.WARNING):
        pages.markdown("one", "", "")
        pages.markdown("two", "", "")
    assert calls == ["run-one"] and "artifacts are paused" in caplog.text and "secret" not in caplog.text


def test_without_a_server_of_its_own_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefect_pages, "create_markdown_artifact", lambda *_, **__: pytest.fail("sent"))
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        pages = PrefectPages("run")
        assert not pages.enabled
        pages.markdown("summary", "", "")
        pages.log_line("▸ train")
