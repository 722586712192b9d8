import http.server
import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import InputError, TransientError
from tasks.tracking.tracker import (
    STEP_METRIC,
    Tracker,
    _batches,
    check_tracking,
    configure_mlflow,
    default_tracking_uri,
    mlflow_client,
)


def record(step: int, **metrics: float) -> dict[str, Any]:
    return {"step": step, "time": 1_700_000_000.0 + step, "metrics": {"reward/mean": step / 10, **metrics}}


def of(records: list[dict[str, Any]]) -> Callable[[int], list[dict[str, Any]]]:
    return lambda after: [record for record in records if record["step"] > after]


def history(tracker: Tracker, name: str) -> list[tuple[int, float]]:
    points = mlflow_client(tracker.uri).get_metric_history(tracker.run_id, name)
    return sorted((p.step, p.value) for p in points)


def open_tracker(uri: str, root: Path | None) -> Tracker:
    return Tracker(uri, "exp", "my-run", "key1", root)


def test_environment_is_set_but_the_user_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "7")
    configure_mlflow()
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "7"


def test_tracking_module_leaves_mlflow_for_later() -> None:
    code = "import sys, tasks.tracking.tracker; raise SystemExit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_flushing_twice_or_after_a_crash_never_doubles_a_point(sqlite_uri: str, tmp_path: Path) -> None:
    records = [record(1), record(2), record(3)]
    first = open_tracker(sqlite_uri, tmp_path)
    assert first.flush(of(records[:2])) == 2
    assert first.flush(of(records)) == 1
    assert first.flush(of(records)) == 0
    # A second process: nothing in memory, the step's other time stamp would make MLflow keep both points.
    again = [{**r, "time": r["time"] + 50} for r in [*records, record(4)]]
    second = open_tracker(sqlite_uri, tmp_path)
    assert second.flush(of(again)) == 1
    assert second.run_id == first.run_id
    assert history(second, "reward/mean") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert history(second, STEP_METRIC) == [(1, 1), (2, 2), (3, 3), (4, 4)]
    run = mlflow_client(sqlite_uri).get_run(second.run_id)
    assert run.data.tags["rollforward.run"] == "my-run" and run.data.tags["rollforward.key"] == "key1"
    # A run of another folder, or one that was begun anew, may have the name too.
    other = Tracker(sqlite_uri, "exp", "my-run", "key2", tmp_path)
    assert other.flush(of(records)) == 3 and other.run_id != first.run_id


def test_a_run_whose_description_failed_is_described_at_the_next_call(sqlite_uri: str, tmp_path: Path) -> None:
    described: list[str] = []

    def describe(tracker: Tracker) -> None:
        described.append(tracker.run_id)
        if len(described) == 1:
            raise TransientError("MLflow is away")

    tracker = Tracker(sqlite_uri, "exp", "my-run", "key1", tmp_path, describe)
    with pytest.raises(TransientError):
        tracker.set_tags({"a": "1"})
    tracker.set_tags({"a": "2"})
    tracker.set_tags({"a": "3"})
    assert described == [tracker.run_id] * 2


def test_more_metrics_than_one_call_takes(sqlite_uri: str, tmp_path: Path) -> None:
    tracker = open_tracker(sqlite_uri, tmp_path)
    records = [record(s, **{f"m{i}": 0.0 for i in range(300)}) for s in range(8)]
    # MLflow's client would cut a longer list in the middle of a record, and a crash could fall between.
    assert [(len(metrics), count, step) for metrics, count, step in _batches(records)] == [
        (906, 3, 2), (906, 3, 5), (604, 2, 7)
    ]  # fmt: skip
    assert tracker.flush(of(records)) == 8
    assert [step for step, _ in history(tracker, "m299")] == list(range(8))


def test_names_that_mlflow_forbids_and_nan(sqlite_uri: str, tmp_path: Path) -> None:
    tracker = open_tracker(sqlite_uri, tmp_path)
    assert tracker.flush(of([record(1, **{"val/pass@4#x": 0.5, "kl": math.nan})])) == 1
    assert history(tracker, "val/pass_4_x") == [(1, 0.5)]
    assert math.isnan(history(tracker, "kl")[0][1])
    odd = {
        "named/format//mean": 1.0,
        "/named/../tests/.": 2.0,
        f"named/{'x' * 300}/mean": 3.0,
        f"named/{'x' * 301}": 4.0,
    }
    assert tracker.flush(of([record(2, **odd)])) == 1
    assert history(tracker, "named/format/mean") == [(2, 1.0)] and history(tracker, "named/tests") == [(2, 2.0)]
    kept = [name for name in tracker_metrics(sqlite_uri, tracker) if name.startswith("named/xxx")]
    assert len(kept) == 2 and all(len(name) == 250 for name in kept)


def tracker_metrics(uri: str, tracker: Tracker) -> list[str]:
    return sorted(mlflow_client(uri).get_run(tracker.run_id).data.metrics)


def test_config_can_be_logged_again_and_never_conflicts(sqlite_uri: str, tmp_path: Path) -> None:
    root = tmp_path / "home with space" / "artifacts"
    tracker = open_tracker(sqlite_uri, root)
    tracker.log_config({"a.b": 1, "long": "x" * 9000, **{f"p{i}": i for i in range(150)}}, "a:\n  b: 1\n", "hash1")
    open_tracker(sqlite_uri, root).log_config({"a.b": 2, "c": None}, "a:\n  b: 2\n", "hash2")
    run = mlflow_client(sqlite_uri).get_run(tracker.run_id)
    assert run.data.params["a.b"] == "1" and run.data.params["c"] == "None" and len(run.data.params) == 153
    assert run.data.tags["rollforward.config_hash"] == "hash2"
    assert (root / tracker.run_id / "artifacts" / "config.yaml").read_text() == "a:\n  b: 2\n"


def test_files_tags_and_status(sqlite_uri: str, tmp_path: Path) -> None:
    tracker = open_tracker(sqlite_uri, tmp_path)
    (tmp_path / "page.html").write_text("<p>π</p>", encoding="utf-8")
    tracker.log_file(tmp_path / "page.html", "report.html")
    tracker.log_file("plain", "notes/a.txt")
    tracker.set_tags({"x": "1"})
    artifacts = tmp_path / tracker.run_id / "artifacts"
    assert (artifacts / "report.html").read_text(encoding="utf-8") == "<p>π</p>"
    assert (artifacts / "notes/a.txt").read_text() == "plain"
    client = mlflow_client(sqlite_uri)
    tracker.end("FAILED")
    assert client.get_run(tracker.run_id).info.status == "FAILED"
    assert client.get_run(tracker.run_id).data.tags["x"] == "1"
    assert open_tracker(sqlite_uri, tmp_path).run_id == tracker.run_id
    assert client.get_run(tracker.run_id).info.status == "RUNNING"


def test_deleted_experiment_is_explained(sqlite_uri: str, tmp_path: Path) -> None:
    client = mlflow_client(sqlite_uri)
    client.delete_experiment(client.create_experiment("exp", artifact_location=str(tmp_path)))
    with pytest.raises(InputError, match="experiments restore"):
        _ = open_tracker(sqlite_uri, tmp_path).run_id


def test_check_accepts_a_new_sqlite_file(tmp_path: Path) -> None:
    check_tracking(default_tracking_uri(tmp_path / "new home"))


@pytest.mark.parametrize("kind", ["folder", "text", "below a file"])
def test_check_refuses_a_sqlite_path_that_cannot_be_written(tmp_path: Path, kind: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("no database, only words " * 50)
    path = tmp_path / ("text/mlflow.db" if kind == "below a file" else kind)
    with pytest.raises(InputError, match="a writable SQLite file"):
        check_tracking(f"sqlite:///{path}")


def test_check_names_the_refused_connection_at_once() -> None:
    start = time.monotonic()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound but not listening, so nobody else can take the port
        uri = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(InputError) as error:
            check_tracking(uri)
    assert time.monotonic() - start < 30
    assert uri in error.value.expected and error.value.seen == "connection refused"
    assert "mlflow server" in error.value.fix and "tracking.uri" in error.value.fix


def test_check_gives_up_on_a_server_that_never_answers() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        start = time.monotonic()
        with pytest.raises(InputError, match="no answer within 3 s"):
            check_tracking(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert time.monotonic() - start < 30


def test_check_refuses_another_server_and_other_forms(tmp_path: Path) -> None:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Quiet) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with pytest.raises(InputError, match="HTTP status 404"):
            check_tracking(f"http://127.0.0.1:{other.server_port}")
        other.shutdown()
    with pytest.raises(InputError, match="localhost:5000"):
        check_tracking("localhost:5000")


def test_outage_loses_and_doubles_nothing(
    server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    tracker = open_tracker(server.uri, None)
    records = [record(s) for s in range(1, 7)]
    assert tracker.flush(of(records[:2])) == 2
    # What a time-out looks like: the server took step 3, the caller never heard of it.
    open_tracker(server.uri, None).flush(of([{**r, "time": r["time"] + 9} for r in records[:3]]))

    server.kill()
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, "tasks.tracking.outage"):
        assert [tracker.flush(of(records[:n])) for n in (3, 4, 5)] == [0, 0, 0]
    assert time.monotonic() - start < 40
    assert len(caplog.records) == 1 and "sent later" in caplog.text
    late = open_tracker(server.uri, None)
    assert late.flush(of(records)) == 0
    late.end("FAILED")
    with pytest.raises(TransientError):
        tracker.set_tags({"x": "1"})

    server.start()
    assert tracker.flush(of(records)) == 3
    assert late.flush(of(records)) == 0
    assert late.run_id == tracker.run_id
    assert [step for step, _ in history(tracker, "reward/mean")] == [1, 2, 3, 4, 5, 6]
    tracker.log_config({"a": 1}, "a: 1\n", "h")
    tracker.log_file("text", "report.html")
    tracker.end("FINISHED")
    assert mlflow_client(server.uri).get_run(tracker.run_id).info.status == "FINISHED"
