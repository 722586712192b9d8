"""Registered versions of small folders, as runs leave them."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rl_core.storage.store import Store
from tasks.registry.registry import Registry
from tasks.tracking.tracker import Tracker

NAME = "sorter"
DATA = hashlib.sha256(b"data").hexdigest()
SCORES = {"score_before": 0.25, "score_after": 0.75}


def model_folder(path: Path) -> Path:
    (path / "sub").mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "qwen3"}')
    (path / "sub" / "chat_template.jinja").write_text("{{ messages }}")
    save_file({"w": torch.arange(12.0)}, path / "model.safetensors")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def make_run(uri: str, root: Path | None) -> str:
    return Tracker(uri, "exp", "my-run", "key1", root and root / "artifacts of home").run_id


def register(uri: str, run_id: str, folder: Path, checkpoint: str, **tags: str) -> str:
    facts = {"run": "my-run", "step": "12", "config_hash": "c", "data_hash": "d", **tags}
    scores = {name: score for name, score in SCORES.items() if name not in tags}
    return Registry(uri, NAME).register(folder, run_id, checkpoint, facts, scores)


def checkpoint(number: int) -> str:
    """What identifies the files of a version with this number."""
    return hashlib.sha256(str(number).encode()).hexdigest()


def registry_with(uri: str, root: Path, *versions: dict[str, str]) -> Registry:
    """A registry with a version of each of the given tags."""
    folder, run_id = model_folder(root / "export"), make_run(uri, root)
    for number, tags in enumerate(versions, 1):
        register(uri, run_id, folder, checkpoint(number), **tags)
    return Registry(uri, NAME)


def run_in_store(url: str, steps: int) -> Store:
    """What a run of so many steps leaves in its folder, as far as lineage reads it."""
    store = Store(url)
    store.write_json("run.json", {"name": "my-run", "recipe": "demo", "config": {"trainer": {"steps": steps}}})
    meta: dict[str, Any] = {
        "train_rows": 128, "val_rows": 32, "dropped": {"train": {"overlong": 3}, "val": {}}, "data_hash": DATA,
        "data_sources": {"digits": 160}, "sources": [{"source": "files", "train_rows": 128, "weight": 1.0}],
        "files": {"rows.jsonl": DATA[:16]},
    }  # fmt: skip
    store.commit_folder("data", meta)
    for step in range(1, steps + 1):
        store.write_bytes(f"rollouts/step_{step:06d}.parquet", b"")
    for step, score in ((0, 0.25), (steps, 0.75)):
        store.write_json(f"evaluation/step_{step:06d}.json", {"greedy": score, "sampled": score, "rows": 32})
    words = (
        "greedy score 0.750, champion 0.250 on 32 rows; difference +0.500, "
        "90% interval +0.350 to +0.650 (minimum +0.000)"
    )
    check = {"name": "better", "passed": True, "words": words}
    store.write_json("evaluation/decision.json", {"promote": True, "mode": "enforce", "checks": [check]})
    return store
