import logging
from pathlib import Path
from typing import Any

import pytest
from support_traces import ANSWER, TOKENIZER, step_parquet

from rl_core.errors import InputError
from rl_core.storage import run_files
from rl_core.storage.ledger import Ledger
from rl_core.storage.store import Store
from tasks.tracking.traces import TRACED_TAG, Traces
from tasks.tracking.tracker import Tracker, mlflow_client, mlflow_errors

TIME = 1_700_000_000.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A run with the rollouts and records of three steps."""
    store = Store(str(tmp_path / "run"))
    for step in (1, 2, 3):
        store.write_bytes(run_files.rollouts(step), step_parquet())
        Ledger(store).write(step, {"step": step, "time": TIME + step, "metrics": {}})
    return store


def traces(uri: str, store: Store, per_step: int = 2, root: Path | None = None) -> Traces:
    return Traces(Tracker(uri, "exp", "my-run", "key1", root), store, TOKENIZER, per_step)


def found(sender: Traces) -> dict[tuple[int, int], Any]:
    """The traces of the run by step and row."""
    client, run_id = mlflow_client(sender.tracker.uri), sender.tracker.run_id
    experiment = client.get_run(run_id).info.experiment_id
    every = client.search_traces(locations=[experiment], run_id=run_id, max_results=100)
    by_row = {(int(t.info.tags["rollforward.step"]), int(t.info.tags["rollforward.row"])): t for t in every}
    assert len(by_row) == len(every)
    return by_row


def spans(trace: Any) -> list[tuple[str, str, str]]:
    ordered = sorted(trace.data.spans, key=lambda span: (span.start_time_ns, span.parent_id or ""))
    return [(span.name, span.span_type, span.status.status_code.value) for span in ordered]


def test_committed_steps_get_their_traces_once(sqlite_uri: str, store: Store, tmp_path: Path) -> None:
    first = traces(sqlite_uri, store, root=tmp_path)
    assert [first.flush(upto) for upto in (0, 1, 1, 2)] == [0, 2, 0, 2]
    # After a crash between the traces and the tag, a second process sends them again.
    first.tracker.set_tags({TRACED_TAG: "1"})
    again = traces(sqlite_uri, store, root=tmp_path)
    assert again.flush(2) == 2 and traces(sqlite_uri, store, root=tmp_path).flush(2) == 0
    both = found(again)
    assert sorted(both) == [(1, 1), (1, 3), (2, 1), (2, 3)]
    info = both[2, 1].info
    assert info.tags["rollforward.run"] == "my-run" and info.tags["rollforward.key"] == "key1"
    assert info.tags["mlflow.traceName"] == "step 2, row 1"
    assert info.request_time == (TIME + 2) * 1000 and info.state.value == "OK"
    assert info.request_preview.startswith("<|user|>6*7") and info.response_preview == "42"
    assert [(each.name, each.value) for each in info.assessments] == [("score", 1.0)]
    assert info.token_usage == {"input_tokens": 11, "output_tokens": 9, "total_tokens": 20}


def test_spans_are_the_turns_and_calls_of_a_trajectory(sqlite_uri: str, store: Store, tmp_path: Path) -> None:
    sender = traces(sqlite_uri, store, per_step=9, root=tmp_path)
    assert sender.flush(1) == 4  # all that there are
    asked, late, refused = (found(sender)[1, row] for row in (1, 2, 3))
    assert spans(asked) == [
        ("trajectory", "AGENT", "OK"), ("turn 1", "CHAT_MODEL", "OK"),
        ("calculator", "TOOL", "OK"), ("search", "TOOL", "ERROR"), ("turn 2", "CHAT_MODEL", "OK"),
    ]  # fmt: skip
    by_name = {span.name: span for span in asked.data.spans}
    root, turn, calculator, search = (by_name[name] for name in ("trajectory", "turn 2", "calculator", "search"))
    assert root.outputs == {"answer": "42", "score": 1.0} and root.inputs == {
        "prompt": "<|user|>6*7<|end|><|assistant|>"
    }
    assert root.attributes["rewards"]["turns"] == 0.5 and root.attributes["advantage"] == 1.0
    assert turn.inputs == {"read": ANSWER} and turn.outputs == {"text": "42<|end|>"} and turn.parent_id == root.span_id
    assert turn.attributes["tokens"] == 3 and turn.attributes["log_prob"] == -0.25
    assert turn.attributes["versions"] == [4] and turn.attributes["reward"] == 0.625
    assert calculator.inputs == {"expression": "6*7?", "scale": "NaN"} and calculator.outputs == "42"
    assert "timeout: no answer within 2 s" in search.status.description and len(search.events) == 1
    assert (search.end_time_ns - search.start_time_ns, turn.start_time_ns > search.end_time_ns) == (2_000_000_000, True)
    assert late.info.state.value == refused.info.state.value == "ERROR" and late.info.assessments == []
    assert spans(late)[0] == ("trajectory", "AGENT", "ERROR") and spans(refused) == spans(late)[:1]
    assert "agent.timeout_s" in next(s for s in late.data.spans if s.name == "trajectory").status.description


def test_none_are_sent_where_none_are_asked_for(sqlite_uri: str, store: Store, tmp_path: Path) -> None:
    sender = traces(sqlite_uri, store, per_step=0, root=tmp_path)
    assert sender.flush(3) == 0 and found(sender) == {}
    assert TRACED_TAG not in mlflow_client(sqlite_uri).get_run(sender.tracker.run_id).data.tags


def test_a_step_without_readable_rollouts_is_passed_over(
    sqlite_uri: str, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.remove(run_files.rollouts(1))
    store.write_bytes(run_files.rollouts(2), b"no parquet")
    sender = traces(sqlite_uri, store, root=tmp_path)
    with caplog.at_level(logging.WARNING, "tasks.tracking.traces"):
        assert sender.flush(3) == 2
    assert [record.message.partition(".")[0] for record in caplog.records] == [
        "No traces for step 1",
        "No traces for step 2",
    ]
    assert sorted(found(sender)) == [(3, 1), (3, 3)]


def test_a_server_that_is_too_old_is_no_end_of_training() -> None:
    with pytest.raises(InputError, match="update the server"), mlflow_errors("http://old"):
        raise NotImplementedError("log_spans is not supported")


def test_an_outage_keeps_traces_for_later(
    server: Any, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    sender = traces(server.uri, store)
    assert sender.flush(1) == 2
    server.kill()
    with caplog.at_level(logging.WARNING, "tasks.tracking.outage"):
        assert [sender.flush(2), sender.flush(3)] == [0, 0]
    assert len(caplog.records) == 1 and "Traces are stored and sent later" in caplog.text
    server.start()
    assert sender.flush(3) == 4
    sender.tracker.set_tags({TRACED_TAG: "0"})
    assert traces(server.uri, store).flush(3) == 6
    every = found(sender)
    assert sorted(every) == [(step, row) for step in (1, 2, 3) for row in (1, 3)]
    assert spans(every[3, 1])[2] == ("calculator", "TOOL", "OK")
    assert every[3, 1].info.token_usage["total_tokens"] == 20
    assert [each.value for each in every[3, 1].info.assessments] == [1.0]
