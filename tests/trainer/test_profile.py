"""Profiles of the steps in `trainer.profile_steps`."""

import gzip
import json
from pathlib import Path

from support_training import Trained

from rl_core.storage import run_files
from rl_core.storage.store import Store
from tasks.runs.report_page import run_page


def test_a_profiled_step_leaves_a_trace_of_every_rank(trained: Trained) -> None:
    store = trained.store("tools")
    assert store.listdir(run_files.PROFILE) == ["step_000002"]
    (name,) = store.listdir(run_files.profile(2))
    assert name == "ActorRolloutRefWorker_0.json.gz"
    trace = json.loads(gzip.decompress(store.read_bytes(f"{run_files.profile(2)}/{name}")))
    operations = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"}
    assert {"aten::mm", "aten::scaled_dot_product_attention"} <= operations
    assert any("FSDP::pre_forward" in name or "Backward" in name for name in operations), "the update is in it"
    assert ["time/profile" in record["metrics"] for record in trained.records("tools")] == [False, True]


def test_the_report_lists_profiles(trained: Trained, tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    config = trained.configs["tools"].model_dump(mode="json")
    store.write_json(run_files.RUN, {"name": "a", "recipe": "b", "config": config, "created": 0, "config_hash": "c"})
    assert "Profiles" not in run_page(store, {})
    store.write_bytes(f"{run_files.profile(2)}/rank.json.gz", b"")
    assert "profile/step_000002" in run_page(store, {})
