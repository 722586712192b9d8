from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rl_core.config.compose import compose
from rl_core.data import dataset as module
from rl_core.data.dataset import RLHFDataset, encode_prompt
from rl_core.data.prepare import prepare_data
from rl_core.data.rows import make_row
from rl_core.errors import InputError
from rl_core.storage.store import Store

ROWS = [make_row("exact", str(i), "math", str(i), str(i), "train", i) for i in range(10)]


def test_items_are_rows_with_their_prompts_as_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = RLHFDataset(ROWS, tokenizer)
    assert len(rows) == 10
    assert rows[7] == ROWS[7] | {"prompt_ids": encode_prompt(tokenizer, ROWS[7]["prompt"], "row 8")}
    assert all(type(token) is int for token in rows[7]["prompt_ids"])


def test_tokens_are_kept_for_a_bounded_number_of_prompts(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    real = module.encode_prompt

    def counted(tokenizer: PreTrainedTokenizerBase, prompt: Any, where: str, tools: Any) -> list[int]:
        made.append(where)
        return real(tokenizer, prompt, where, tools)

    monkeypatch.setattr(module, "PROMPTS_KEPT", 3)
    monkeypatch.setattr(module, "encode_prompt", counted)
    rows = RLHFDataset(ROWS, tokenizer)
    for i in (0, 1, 2, 0, 3, 0, 1):
        rows[i]["prompt_ids"].append(-1)  # what a user does with its list must not stay
    assert made == ["row 1", "row 2", "row 3", "row 4", "row 2"]
    assert rows[0]["prompt_ids"] == encode_prompt(tokenizer, ROWS[0]["prompt"], "row 1")


def test_rows_of_a_mixture_lie_one_source_after_the_other(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    first = "{source: sort_digits, train_rows: 40, val_rows: 3}"
    second = "{source: copy_digits, train_rows: 70, val_rows: 2, weight: 3}"
    config = compose("grpo", [f"data.mixture=[{first}, {second}]"]).config
    store = Store(str(tmp_path))
    meta = prepare_data(config, store, tokenizer)
    assert [(each["train_rows"], each["weight"]) for each in meta["sources"]] == [(40, 1.0), (70, 3.0)]
    train, val = (RLHFDataset.load(store, split, tokenizer) for split in ("train", "val"))
    assert train.sizes == [40, 70] and len(train) == 110 and len(val) == 5
    names = [config.data.sources[train.source_of(i)].source for i in range(110)]
    assert names == [train[i]["data_source"] for i in range(110)] == ["sort_digits"] * 40 + ["copy_digits"] * 70


def test_rows_that_were_not_committed_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(InputError, match="prepare the data first"):
        RLHFDataset.load(Store(str(tmp_path)), "train", tokenizer)
