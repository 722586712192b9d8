"""The cost of what is read of a run's ledger does not grow with the number of steps."""

import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support_pages import Page
from support_runs import make_run

from rl_core.reports.compare import metric_rows, render_comparison, score_rows
from rl_core.reports.model_card import CURVE_ROWS, _curve
from rl_core.storage import run_files
from rl_core.storage.ledger import Ledger
from rl_core.storage.store import Store
from tasks.runs.compare import side
from tasks.runs.overview import overview
from tasks.runs.report_page import run_page
from tasks.runs.run import SAMPLED_RECORDS, last_records, sampled_records
from tasks.tracking.tracker import _METRICS_PER_BATCH, Tracker

STEPS = 1_000_000
READS = list[int]()


class LongStore(Store):
    """A run's store whose ledger has `STEPS` records; each is made when it is read."""

    def read_bytes(self, rel: str) -> bytes:
        if not self.url.endswith(f"/{run_files.LEDGER}"):
            return super().read_bytes(rel)
        READS.append(step := int(rel[len("step_") : -len(".json")]))
        further = ", ".join(f'"perf/further_{i}": {i / 7}' for i in range(30))
        commit = ', "time/commit": 1.0' if step % 100 == 0 else ""
        metrics = f'{{"reward/mean": {step / STEPS}, "time/step": 2.0, "time/rollout": 1.5{commit}, {further}}}'
        return f'{{"step": {step}, "time": {1000 + step}, "metrics": {metrics}}}'.encode()


@pytest.fixture
def long_run(tmp_path: Path) -> LongStore:
    store = LongStore(make_run(tmp_path, "long", "trainer.steps=1000000").url)
    store.write_json(f"{run_files.checkpoint(STEPS)}/state.json", {})
    store.commit_folder(run_files.checkpoint(STEPS), {"step": STEPS})
    score = {"greedy": 0.75, "sampled": 0.5, "rows": 1, "samples": store.read_json(run_files.evaluation(0))["samples"]}
    for step in (200_000, STEPS):  # as text, the name of the first is the greater one
        store.write_json(run_files.evaluation(step), {**score, "greedy": step / STEPS})
    READS.clear()
    return store


def test_pages_of_a_million_steps_are_made_from_a_bounded_number_of_records(long_run: LongStore) -> None:
    began = time.process_time()
    tracemalloc.start()
    try:
        page = Page(run_page(long_run, {}))
        both = (side(long_run),) * 2
        comparison, row = Page(render_comparison(*both)), overview(long_run, "long")
        last = last_records(long_run, 10)
        curve = _curve(sampled_records(long_run))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 60e6, f"{peak / 1e6:.0f} MB"
    assert time.process_time() - began < 30, "CPU seconds; with the tracing, ten times the usual"
    assert len(READS) <= 3 * SAMPLED_RECORDS + 20
    text = " ".join(page.text.split())
    assert "from 3,000 of 1,000,000 steps" in text and "reward 1e-06 → 1" in text and "100.0 %" in text
    assert "23d03h" in text and comparison.count("svg") == 1, "2,000,000 s"
    assert score_rows(*both)[:3] == [
        ("steps", "1000000", "1000000"),
        ("steps in time and curves", "3000", "3000"),
        ("time of the steps", "23d03h", "23d03h"),
    ]
    assert metric_rows(*both) == [("reward/mean", "1e-06 → 1", "1e-06 → 1")]
    assert (row.step, row.reward) == (STEPS, 1.0) and [each["step"] for each in last] == [*range(STEPS - 9, STEPS + 1)]
    assert len(curve) == CURVE_ROWS and [curve[0][0], curve[-1][0]] == ["1", str(STEPS)]


def test_a_metric_of_every_hundredth_step_keeps_its_share(long_run: LongStore) -> None:
    # 2,001 records would be read every 500 steps, where each has the metric.
    found = Ledger(long_run).sample(STEPS, 2001)
    assert sum("time/commit" in record["metrics"] for record in found) == pytest.approx(20, abs=10)


def test_mlflow_gets_records_as_they_are_read(long_run: LongStore, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, ahead = list[int](), list[int]()

    def log_batch(run_id: str, metrics: Sequence[Any]) -> None:
        sent.extend({metric.step for metric in metrics})
        ahead.append(len(READS) - len(sent))
        assert len(metrics) <= _METRICS_PER_BATCH

    tracker = Tracker("sqlite:///unused", "exp", "long", "key", None)
    empty = SimpleNamespace(data=SimpleNamespace(metrics={}))
    monkeypatch.setattr(Tracker, "run_id", "id")
    monkeypatch.setattr(Tracker, "_client", SimpleNamespace(get_run=lambda run_id: empty, log_batch=log_batch))
    count = 10_000
    assert tracker.send(lambda after: Ledger(long_run).records(count, max(after, 0))) == count
    assert sorted(sent) == list(range(1, count + 1)) and max(ahead) <= 1, "a record that no longer fits is read ahead"
