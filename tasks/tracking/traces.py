"""Trajectories of committed steps as MLflow traces, each sent once: its id is a hash of run, step and row."""

import json
import logging
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from rl_core.errors import InputError
from rl_core.reports.transcripts import Transcript, Turn, transcripts
from rl_core.runtime.process_pool import writable
from rl_core.storage import run_files
from rl_core.storage.ledger import Ledger
from rl_core.storage.store import Store
from tasks.tracking.outage import OutageGuard
from tasks.tracking.tracker import KEY_TAG, RUN_TAG, Tracker, mlflow_client, mlflow_errors

if TYPE_CHECKING:
    from mlflow.entities import Span, TraceInfo

logger = logging.getLogger(__name__)

TRACED_TAG = "rollforward.traced_step"
STEP_TAG = "rollforward.step"
ROW_TAG = "rollforward.row"

_MS = 1_000_000  # in ns
_TURN_NS = _MS
"""Nominal duration of a turn: sampling times are not recorded, and spans without duration have no order."""
_PREVIEW = 1000
"""Length of a preview in MLflow, in characters."""


class Traces:
    """Sends trajectories of each committed step to the tracker's MLflow run."""

    def __init__(self, tracker: Tracker, store: Store, tokenizer: PreTrainedTokenizerBase, per_step: int) -> None:
        """`store` is the run's; `per_step` is the number of trajectories sent per step."""
        self.tracker, self.store, self.tokenizer, self.per_step = tracker, store, tokenizer, per_step
        self._outage = OutageGuard(tracker.uri, "Traces")
        self._last_step: int | None = None

    def flush(self, upto: int) -> int:
        """As `send`, with short timeouts; an outage is logged and 0 is returned."""
        with self._outage.tolerate():
            if self.per_step:
                self._outage.probe()
            return self.send(upto)
        return 0

    def send(self, upto: int) -> int:
        """Sends the traces up to the committed step `upto` that MLflow lacks; returns their number.

        A step with missing or damaged rollouts has no traces. Raises `TransientError` on an outage.
        """
        sent = 0
        if not self.per_step:
            return sent
        for step in range(self._traced_step() + 1, upto + 1):
            sent += self._send(step)
            self.tracker.set_tags({TRACED_TAG: str(step)})
            self._last_step = step
        return sent

    def _traced_step(self) -> int:
        """The last step whose traces MLflow has, 0 without any; read once, then cached."""
        if self._last_step is None:
            run_id = self.tracker.run_id
            with mlflow_errors(self.tracker.uri):
                tags = mlflow_client(self.tracker.uri).get_run(run_id).data.tags
            self._last_step = int(tags.get(TRACED_TAG, 0))
        return self._last_step

    def _send(self, step: int) -> int:
        from mlflow.tracing.client import TracingClient

        run_id, found = self.tracker.run_id, self._transcripts(step)
        start_ns = int(Ledger(self.store).read(step)["time"] * 1e9)
        with mlflow_errors(self.tracker.uri):
            client = TracingClient(self.tracker.uri)
            experiment_id = mlflow_client(self.tracker.uri).get_run(run_id).info.experiment_id
            spans: list[Span] = []
            for rank, each in enumerate(found):
                trace_id = sha256(f"{run_id}/{step}/{each.position}".encode()).digest()[:16]
                # MLflow lists the newest trace first; the offset puts a step's best trajectory on top.
                trace = trace_spans(each, trace_id, start_ns - rank * _MS)
                info = trace_info(each, trace, experiment_id)
                info.trace_metadata["mlflow.sourceRun"] = run_id
                info.tags |= {RUN_TAG: self.tracker.run_name, KEY_TAG: self.tracker.run_key, STEP_TAG: str(step)}
                info.tags["mlflow.traceName"] = f"step {step}, row {each.position}"
                client.start_trace(info)
                spans += trace
            client.log_spans(experiment_id, spans)
        return len(found)

    def _transcripts(self, step: int) -> list[Transcript]:
        rel = run_files.rollouts(step)
        try:
            return transcripts(self.store.read_bytes(rel), self.per_step, self.tokenizer, f"{self.store.url}/{rel}")
        except (FileNotFoundError, InputError) as error:
            logger.warning("No traces for step %d. %s", step, error)
            return []


def trace_info(transcript: Transcript, spans: "Sequence[Span]", experiment_id: str) -> "TraceInfo":
    """The listing entry of a trajectory: previews of prompt and answer, and the score as an assessment."""
    from mlflow.entities import Feedback, TraceInfo, TraceLocation, TraceState

    root = spans[0]
    assert root.end_time_ns is not None
    score = Feedback(name="score", value=transcript.score)
    # With an id of MLflow's a trace that is sent again would have two scores.
    score.assessment_id = f"a-{root.trace_id.removeprefix('tr-')}"
    return TraceInfo(
        trace_id=root.trace_id,
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=root.start_time_ns // _MS,
        execution_duration=(root.end_time_ns - root.start_time_ns) // _MS,
        state=TraceState.ERROR if transcript.status == "failed" else TraceState.OK,
        request_preview=writable(transcript.prompt[:_PREVIEW])[:_PREVIEW],
        response_preview=writable(transcript.answer[:_PREVIEW])[:_PREVIEW],
        trace_metadata={"mlflow.trace_schema.version": "3"},
        tags={ROW_TAG: str(transcript.position)},
        assessments=[] if transcript.score is None else [score],
    )


def trace_spans(transcript: Transcript, trace: bytes, start_ns: int) -> "list[Span]":
    """The root span of a trajectory, followed by its turns and tool calls; the calls of a turn run concurrently."""
    children: list[Span] = []
    now = start_ns
    for number, turn in enumerate(transcript.turns, 1):
        begin = now + _TURN_NS
        children.append(_turn_span(trace, len(children) + 1, f"turn {number}", turn, (now, begin)))
        now = begin
        for call in turn.calls:
            end = begin + int(call["seconds"] * 1e9)
            children.append(_call_span(trace, len(children) + 1, call, (begin, end)))
            now = max(now, end + _TURN_NS)
    return [_root_span(trace, transcript, (start_ns, now)), *children]


def _root_span(trace: bytes, transcript: Transcript, times: tuple[int, int]) -> "Span":
    facts = asdict(transcript)
    del facts["turns"]
    values = {
        "mlflow.spanType": "AGENT",
        "mlflow.spanInputs": {"prompt": facts.pop("prompt")},
        "mlflow.spanOutputs": {"answer": facts.pop("answer"), "score": transcript.score},
    }
    problem = f"{transcript.stop_reason}: {transcript.detail}" if transcript.status == "failed" else ""
    return _span(trace, 0, "trajectory", times, values | facts, problem)


def _turn_span(trace: bytes, number: int, name: str, turn: Turn, times: tuple[int, int]) -> "Span":
    # Only new tokens count as a turn's input, so that a trace's sums equal the tokens of its trajectory.
    usage = {
        "input_tokens": turn.read_tokens,
        "output_tokens": turn.tokens,
        "total_tokens": turn.read_tokens + turn.tokens,
    }
    values = {
        "mlflow.spanType": "CHAT_MODEL",
        "mlflow.spanInputs": {"read": turn.read},
        "mlflow.spanOutputs": {"text": turn.text},
        "mlflow.chat.tokenUsage": usage,
        "tokens": turn.tokens,
        "log_prob": turn.log_prob,
        "versions": turn.versions,
        "reward": turn.reward,
        "advantage": turn.advantage,
    }
    return _span(trace, number, name, times, values, "")


def _call_span(trace: bytes, number: int, call: dict[str, Any], times: tuple[int, int]) -> "Span":
    values = {
        "mlflow.spanType": "TOOL",
        "mlflow.spanInputs": call["arguments"],
        "mlflow.spanOutputs": call["text"],
        "status": call["status"],
        "detail": call["detail"],
        "seconds": call["seconds"],
    }
    problem = "" if call["status"] == "ok" else f"{call['status']}: {call['detail'] or call['text']}"
    return _span(trace, number, call["name"], times, values, problem)


def _span(trace: bytes, number: int, name: str, times: tuple[int, int], values: dict[str, Any], problem: str) -> "Span":
    """A span with start and end in ns since 1970; number 0 is the root, and a nonempty `problem` marks an error."""
    from mlflow.entities import Span

    attributes = {"mlflow.traceRequestId": f"tr-{trace.hex()}", **values}
    # MLflow's page highlights spans with exceptions and ignores their status.
    exception = {
        "name": "exception", "time_unix_nano": times[1], "attributes": {"exception.message": writable(problem)}
    }  # fmt: skip
    return Span.from_dict(
        {
            "trace_id": b64encode(trace).decode(),
            "span_id": _span_id(number),
            "parent_span_id": _span_id(0) if number else None,
            "name": writable(name) or "call",
            "start_time_unix_nano": times[0],
            "end_time_unix_nano": times[1],
            "status": {"code": "STATUS_CODE_ERROR" if problem else "STATUS_CODE_OK", "message": writable(problem)},
            "events": [exception] if problem else [],
            "attributes": {key: _json(value) for key, value in attributes.items()},
        }
    )


def _span_id(number: int) -> str:
    # An id must be unique within its trace only; OpenTelemetry forbids 0.
    return b64encode((number + 1).to_bytes(8, "big")).decode()


def _json(value: object) -> str:
    """JSON that databases and browsers accept: no lone surrogates; NaN and infinities as strings."""
    plain = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    return json.dumps(json.loads(plain, parse_constant=str), ensure_ascii=False)
