import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from rl_core.config.schema import RunConfig
from rl_core.data.dataset import RLHFDataset
from rl_core.data.prepare import prepare_data
from rl_core.errors import InputError
from rl_core.models.tiny import build_tokenizer
from rl_core.storage import Store

Rows = list[dict[str, Any]]
Configured = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer()


def row(text: str, **changes: Any) -> dict[str, Any]:
    return {
        "data_source": "exact",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": text},
    } | changes


@pytest.fixture
def configured(tmp_path: Path) -> Configured:
    """Config over files with the given rows."""

    def make(train: Rows, val: Rows, **data: Any) -> RunConfig:
        for name, rows in (("train", train), ("val", val)):
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
        paths = {"path": str(tmp_path / "train.parquet"), "val_path": str(tmp_path / "val.parquet")}
        return RunConfig.model_validate({"data": {"source": "files", "train_batch_size": 2, **paths, **data}})

    return make


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "run"))


def test_rows_are_committed_and_read_back(store: Store, tokenizer: PreTrainedTokenizerBase) -> None:
    config = RunConfig.model_validate({"data": {"train_rows": 70, "val_rows": 9}})
    meta = prepare_data(config, store, tokenizer)
    assert meta == {
        "source": "sort_digits",
        "train_rows": 70,
        "val_rows": 9,
        "dropped": {"overlong_prompt": {"train": 0, "val": 0}},
        "data_hash": meta["data_hash"],
    }
    assert store.verify("data") == []
    train, val = (RLHFDataset.load(store, split, tokenizer) for split in ("train", "val"))
    assert (len(train), len(val)) == (70, 9)
    item = val[4]
    digits = item["prompt"][0]["content"]
    assert tokenizer.decode(item["prompt_ids"]).replace(" ", "") == f"<|user|>{digits}<|end|><|assistant|>".replace(
        " ", ""
    )
    assert item["extra_info"]["index"] == 4 and all(type(i) is int for i in item["prompt_ids"])
    assert val[4]["prompt_ids"] is item["prompt_ids"]  # made once


def test_what_is_committed_is_not_made_again(store: Store, tokenizer: PreTrainedTokenizerBase) -> None:
    config = RunConfig.model_validate({"data": {"train_rows": 64, "val_rows": 9}})
    meta = prepare_data(config, store, tokenizer)
    other = RunConfig.model_validate({"data": {"source": "files", "path": "/absent", "val_path": "/absent"}})
    assert prepare_data(other, store, tokenizer) == meta


def test_files_without_a_manifest_are_made_again(store: Store, tokenizer: PreTrainedTokenizerBase) -> None:
    config = RunConfig.model_validate({"data": {"train_rows": 64, "val_rows": 9}})
    meta = prepare_data(config, store, tokenizer)
    store.remove("data/manifest.json")
    store.write_bytes("data/train.parquet", b"cut short")
    with pytest.raises(InputError, match="prepared data"):
        RLHFDataset.load(store, "train", tokenizer)
    assert prepare_data(config, store, tokenizer) == meta
    assert len(RLHFDataset.load(store, "train", tokenizer)) == 64


def test_the_hash_is_of_the_contents_not_of_the_files(
    tmp_path: Path, configured: Configured, tokenizer: PreTrainedTokenizerBase
) -> None:
    def data_hash(name: str, config: RunConfig) -> str:
        return prepare_data(config, Store(str(tmp_path / name)), tokenizer)["data_hash"]

    train, val = [row("1"), row("2")], [row("3")]
    config = configured(train, val)
    first = data_hash("a", config)
    pq.write_table(pa.Table.from_pylist(train), tmp_path / "train.parquet", compression="gzip", row_group_size=1)
    assert data_hash("b", config) == first
    assert data_hash("c", configured(train[::-1], val)) != first
    assert data_hash("d", configured([row("1"), row("4")], val)) != first
    assert data_hash("e", configured([row("1")], [row("2"), row("3")], train_batch_size=1)) != first


def test_an_overlong_prompt_stops_or_is_dropped_and_counted(
    store: Store, configured: Configured, tokenizer: PreTrainedTokenizerBase
) -> None:
    train, val = [row("1"), row("12345678"), row("2")], [row("3")]
    # <|user|> 1 <|end|> <|assistant|> are 4 tokens
    with pytest.raises(InputError, match="11 tokens") as error:
        prepare_data(configured(train, val, max_prompt_length=10), store, tokenizer)
    assert error.value.where == "train row 2"
    assert "data.max_prompt_length=11" in error.value.fix
    meta = prepare_data(configured(train, val, max_prompt_length=10, drop=("overlong",)), store, tokenizer)
    assert meta["train_rows"] == 2 and meta["dropped"] == {"overlong_prompt": {"train": 1, "val": 0}}
    assert [r["reward_model"]["ground_truth"] for r in RLHFDataset.load(store, "train", tokenizer).rows] == ["1", "2"]


def test_a_prompt_of_the_largest_length_is_kept(
    store: Store, configured: Configured, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert prepare_data(configured([row("1"), row("2")], [row("3")], max_prompt_length=4), store, tokenizer)


def test_a_held_out_prompt_must_not_be_trained_on(
    store: Store, configured: Configured, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(InputError, match="val row 2 has the prompt of train row 1"):
        prepare_data(configured([row("1"), row("2")], [row("3"), row("1")]), store, tokenizer)
    assert not store.exists("data")


def test_too_few_rows_are_refused(store: Store, configured: Configured, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(InputError, match="at least 3 train rows.*\n.*2 rows"):
        prepare_data(configured([row("1"), row("2")], [row("3")], train_batch_size=3), store, tokenizer)
    config = configured([row("1"), row("2")], [row("345")], max_prompt_length=4, drop=("overlong",))
    with pytest.raises(InputError, match="at least 1 val rows\n.*0 rows, 1 dropped"):
        prepare_data(config, store, tokenizer)


def test_a_tokenizer_without_a_chat_template_is_refused(store: Store, tokenizer: PreTrainedTokenizerBase) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(InputError, match="chat template") as error:
        prepare_data(RunConfig.model_validate({"model": {"path": "/models/bare"}}), store, bare)
    assert error.value.where == "/models/bare"


def test_a_prompt_that_the_template_refuses_is_named(
    store: Store, configured: Configured, tokenizer: PreTrainedTokenizerBase
) -> None:
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(InputError, match="no system role") as error:
        prepare_data(configured([row("1"), row("2")], [row("3")]), store, strict)
    assert error.value.where == "train row 1"


def test_columns_of_mixed_types_are_refused(
    store: Store, configured: Configured, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_core.data.sources import files

    mixed = [row("1", extra_info={"index": 1}), row("2", extra_info={"index": "two"})]
    monkeypatch.setattr(files, "rows", lambda config, seed: (mixed, [row("3", extra_info={"index": 1})]))
    with pytest.raises(InputError, match="one type"):
        prepare_data(configured([row("1")], [row("3")]), store, tokenizer)
