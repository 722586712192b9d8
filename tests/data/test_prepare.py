import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support_data import row
from transformers import PreTrainedTokenizerBase

from rl_core.config.schema import RunConfig
from rl_core.data.dataset import RLHFDataset
from rl_core.data.prepare import prepare_data, read_report, summary
from rl_core.errors import InputError
from rl_core.storage import run_files
from rl_core.storage.store import Store

Rows = list[dict[str, Any]]
Configured = Callable[..., RunConfig]


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
        "train_rows": 70,
        "val_rows": 9,
        "dropped": {"train": {}, "val": {}},
        "data_hash": meta["data_hash"],
        "data_sources": {"sort_digits": 79},
        "sources": [{"source": "sort_digits", "train_rows": 70, "weight": 1.0}],
        "files": {},
    }
    assert store.verify("data") == []
    assert summary(read_report(store)) == "70 training rows, 9 held out"
    train, val = (RLHFDataset.load(store, split, tokenizer) for split in ("train", "val"))
    assert (len(train), len(val)) == (70, 9)
    item = val[4]
    digits = item["prompt"][0]["content"]
    assert str(tokenizer.decode(item["prompt_ids"])).replace(
        " ", ""
    ) == f"<|user|>{digits}<|end|><|assistant|>".replace(" ", "")
    assert item["extra_info"]["index"] == 4 and all(type(i) is int for i in item["prompt_ids"])


def test_what_is_committed_is_not_made_again(store: Store, tokenizer: PreTrainedTokenizerBase) -> None:
    config = RunConfig.model_validate({"data": {"train_rows": 64, "val_rows": 9}})
    meta = prepare_data(config, store, tokenizer)
    other = RunConfig.model_validate({"data": {"source": "files", "path": "/absent", "val_path": "/absent"}})
    assert prepare_data(other, store, tokenizer) == meta


def test_files_without_a_manifest_are_made_again(store: Store, tokenizer: PreTrainedTokenizerBase) -> None:
    config = RunConfig.model_validate({"data": {"train_rows": 64, "val_rows": 9}})
    meta = prepare_data(config, store, tokenizer)
    store.remove("data/manifest.json")
    store.write_bytes("data/train/part_00000.parquet", b"cut short")
    with pytest.raises(InputError, match="prepared data"):
        RLHFDataset.load(store, "train", tokenizer)
    assert prepare_data(config, store, tokenizer) == meta
    assert len(RLHFDataset.load(store, "train", tokenizer)) == 64


def test_the_hash_is_of_the_contents_not_of_the_files(
    tmp_path: Path, configured: Configured, tokenizer: PreTrainedTokenizerBase
) -> None:
    def data_hash(name: str, config: RunConfig) -> str:
        return str(prepare_data(config, Store(str(tmp_path / name)), tokenizer)["data_hash"])

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
    drop: dict[str, Any] = {"drop": ("overlong",), "max_dropped_share": 0.4}
    meta = prepare_data(configured(train, val, max_prompt_length=10, **drop), store, tokenizer)
    assert meta["train_rows"] == 2 and meta["dropped"] == {"train": {"overlong": 1}, "val": {}}
    assert [r["reward_model"]["ground_truth"] for r in RLHFDataset.load(store, "train", tokenizer).rows] == ["1", "2"]
    listed = [json.loads(line) for line in store.read_bytes(run_files.DROPPED_ROWS).splitlines()]
    assert listed == [{"split": "train", "where": "train row 2", "reason": "overlong", "detail": "11 tokens"}]
    assert summary(read_report(store)) == "2 training rows, 1 held out; dropped 1 (overlong 1)"
    prepare_data(configured([row("1"), row("1")], val), other := Store(f"{store.url}-repeats"), tokenizer)
    assert summary(read_report(other)) == "2 training rows, 1 held out; 1 repeat a prompt"
    committed = {file["path"] for file in (store.read_manifest(run_files.DATA) or {})["files"]}
    assert {"report.json", "report.html", "dropped.jsonl"} < committed


def test_a_prompt_of_the_largest_length_is_kept(
    store: Store, configured: Configured, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert prepare_data(configured([row("1"), row("2")], [row("3")], max_prompt_length=4), store, tokenizer)


def test_a_held_out_prompt_must_not_be_trained_on(
    store: Store, configured: Configured, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_core.data.store.PART_ROWS", 1)  # so that there is a part before the run is stopped
    with pytest.raises(InputError, match="the prompt of val row 2\n.*train row 1"):
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
    assert error.value.where == "val row 1"


def test_what_an_attempt_that_did_not_end_has_left_is_removed(store: Store, tokenizer: PreTrainedTokenizerBase) -> None:
    store.write_bytes("data/more/part_00007.parquet", b"of an earlier attempt")
    prepare_data(RunConfig.model_validate({"data": {"train_rows": 64, "val_rows": 9}}), store, tokenizer)
    assert store.listdir("data") == ["dropped.jsonl", "manifest.json", "report.html", "report.json", "train", "val"]


def test_rows_of_a_mixture_follow_each_other_and_are_numbered_anew(
    store: Store, configured: Configured, tokenizer: PreTrainedTokenizerBase
) -> None:
    paths = configured([row("1"), row("2")], [row("3")]).data
    files = {"source": "files", "path": paths.path, "val_path": paths.val_path, "weight": 2.0}
    made = {"source": "sort_digits", "train_rows": 3, "val_rows": 1}
    config = RunConfig.model_validate({"data": {"mixture": [files, made], "train_batch_size": 2}})
    meta = prepare_data(config, store, tokenizer)
    assert [(each["source"], each["train_rows"], each["weight"]) for each in meta["sources"]] == [
        ("files", 2, 2.0), ("sort_digits", 3, 1.0),
    ]  # fmt: skip
    train = RLHFDataset.load(store, "train", tokenizer).rows
    assert [row["extra_info"]["index"] for row in train] == [0, 1, 2, 3, 4]
    assert [row["data_source"] for row in train] == ["exact", "exact", *["sort_digits"] * 3]
    assert len(meta["files"]) == 2
