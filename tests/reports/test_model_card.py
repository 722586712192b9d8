"""The model card, and the identity of an export, which the card is no part of."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from support_registry import model_folder

from rl_core.config.reward import CodeConfig
from rl_core.reports.model_card import folder_hash, render_card, weights_hash
from rl_core.storage.store import Store

FACTS: dict[str, Any] = {
    "name": "sorter", "base": "/models/Base_Model", "step": 12, "recipe": "demo", "settings": {"trainer.steps": 12},
    "lineage": {"config hash": "c" * 64, "flow run": None}, "prompt_length": 16, "response_length": 8, "seed": 0,
    "programs": "",
}  # fmt: skip
DATA: dict[str, Any] = {
    "train_rows": 1280, "val_rows": 32, "dropped": {"train": {"overlong": 3}, "val": {}}, "data_hash": "d" * 64,
    "data_sources": {"digits": 1312}, "sources": [], "files": {},
}  # fmt: skip
RECORDS = [
    {"step": step, "metrics": {"score/mean": step / 20, "actor/entropy": 1 / step, "perf/x": 7.0}}
    for step in range(1, 13)
]
BEFORE = {"greedy": 0.25, "sampled": 0.2}
AFTER = {
    "greedy": 0.75, "sampled": 0.7, "intervals": {"greedy": [0.7, 0.8]}, "rows": 32,
    "sources": {"digits": {"greedy": 0.75, "sampled": 0.7, "rows": 32}},
}  # fmt: skip


def test_the_hub_reads_the_card_and_a_person_finds_what_counts() -> None:
    text = render_card(FACTS, BEFORE, AFTER, DATA, RECORDS)
    data: Any = ModelCard(text).data
    assert data.library_name == "transformers" and data.pipeline_tag == "text-generation"
    assert {result.metric_type: result.metric_value for result in data.eval_results} == {
        "greedy": 0.75, "sampled": 0.7
    }  # fmt: skip
    for line in (
        "| greedy | 0.250 | 0.750 [0.700, 0.800] |",
        "| sampled | 0.200 | 0.700 |",
        "| digits | 32 | 0.750 | 0.700 |",
        "| rows by source | digits 1,312 |",
        "| dropped | 3 train overlong |",
        "| step | score | entropy |",
        "| 1 | 0.05 | 1 |",
        "| 12 | 0.6 | 0.08333 |",
        "| trainer.steps | 12 |",
        f"| config hash | {'c' * 64} |",
        "vllm serve FOLDER --served-model-name sorter",
    ):
        assert f"\n{line}\n" in text, line
    assert "flow run" not in text and text.count("\n| ") < 40


def test_what_is_not_known_is_left_out() -> None:
    text = render_card(FACTS, BEFORE, BEFORE, DATA, [])
    assert "No training steps." in text and "By source" not in text and "32 held-out prompts" in text


def test_programs_without_isolation_are_named_among_the_limits() -> None:
    text = render_card({**FACTS, "programs": CodeConfig(isolation="none").risk}, BEFORE, AFTER, DATA, RECORDS)
    assert "\n- Programs written by the model are not isolated (reward.code.isolation=none): they can read" in text
    assert "isolated" not in render_card({**FACTS, "programs": CodeConfig().risk}, BEFORE, AFTER, DATA, RECORDS)


def test_texts_of_others_stay_texts() -> None:
    evil = "a|b\n\n# Heading\n<script>[x](http://y) \x1b[31m"
    text = render_card({**FACTS, "settings": {"a": evil}}, BEFORE, AFTER, {**DATA, "data_sources": {evil: 1}}, RECORDS)
    body = text.split("\n---\n", 1)[1]
    assert "\n# Heading" not in body and "\x1b" not in text
    assert r"| a | a\|b \# Heading \<script\>\[x\](http://y)" in body
    data: Any = ModelCard(text).data
    assert len(data.eval_results) == 2


def test_a_card_does_not_change_what_an_export_is(tmp_path: Path) -> None:
    store, folder = Store(str(tmp_path)), model_folder(tmp_path / "export")
    first = weights_hash(store.commit_folder("export", {"step": 1}))
    assert folder_hash(folder) == first
    (folder / "README.md").write_text("a card")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "mark").write_text("when it was fetched")
    assert weights_hash(store.commit_folder("export", {"step": 2})) == folder_hash(folder) == first
    (folder / "sub" / "chat_template.jinja").write_text("another")
    assert weights_hash(store.commit_folder("export", {"step": 2})) == folder_hash(folder) != first
