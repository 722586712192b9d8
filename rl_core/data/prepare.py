"""From a source to the committed files that a run trains and is evaluated on."""

from typing import TYPE_CHECKING, Any

from rl_core.config.schema import DataConfig, RunConfig
from rl_core.data.dataset import ToolsOf, check_tokenizer, encode_prompt, without_tools
from rl_core.data.rows import Row, canonical, content_hash, parquet_bytes, to_table
from rl_core.data.sources import load_source
from rl_core.errors import InputError
from rl_core.storage import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLITS = ("train", "val")


def prepare_data(
    config: RunConfig, store: Store, tokenizer: "PreTrainedTokenizerBase", tools_of: ToolsOf = without_tools
) -> dict[str, Any]:
    """Make, check and commit the rows as `data/train.parquet` and `data/val.parquet`; once done, only look it up.

    Returns {source, train_rows, val_rows, dropped: {reason: {split: count}}, data_hash}. Raises InputError when
    the tokenizer or the rows cannot be used.
    """
    manifest = store.read_manifest("data")
    if manifest is None:
        manifest = _prepare(config, store, tokenizer, tools_of)
    meta: dict[str, Any] = manifest["meta"]
    return meta


def _prepare(
    config: RunConfig, store: Store, tokenizer: "PreTrainedTokenizerBase", tools_of: ToolsOf
) -> dict[str, Any]:
    check_tokenizer(tokenizer, config.model.path)
    made = load_source(config.data.source).rows(config.data, config.trainer.seed)
    splits = {
        name: _fitting(rows, name, config.data, tokenizer, tools_of) for name, rows in zip(SPLITS, made, strict=True)
    }
    dropped = {name: len(rows) - len(splits[name]) for name, rows in zip(SPLITS, made, strict=True)}
    _check_enough(splits, dropped, config.data)
    _check_disjoint(splits["train"], splits["val"])
    tables = {name: to_table(rows, f"{name} rows of data.source={config.data.source}") for name, rows in splits.items()}
    for name, table in tables.items():
        store.write_bytes(f"data/{name}.parquet", parquet_bytes(table))
    meta = {
        "source": config.data.source,
        "train_rows": len(splits["train"]),
        "val_rows": len(splits["val"]),
        "dropped": {"overlong_prompt": dropped},
        # Of the rows as readers get them: a column of structs gives every row all of its keys.
        "data_hash": content_hash(table.to_pylist() for table in tables.values()),
    }
    return store.commit_folder("data", meta)


def _fitting(
    rows: list[Row], split: str, config: DataConfig, tokenizer: "PreTrainedTokenizerBase", tools_of: ToolsOf
) -> list[Row]:
    """Rows whose prompt is short enough."""
    kept = []
    for number, row in enumerate(rows, start=1):
        where = f"{split} row {number}"
        length = len(encode_prompt(tokenizer, row["prompt"], where, tools_of(row)))
        if length <= config.max_prompt_length:
            kept.append(row)
        elif "overlong" not in config.drop:
            raise InputError(
                f"prompts of at most data.max_prompt_length={config.max_prompt_length} tokens",
                f"{length} tokens",
                where,
                f"set data.max_prompt_length={length} or more, or data.drop=[overlong] to leave such rows out",
            )
    return kept


def _check_enough(splits: dict[str, list[Row]], dropped: dict[str, int], config: DataConfig) -> None:
    for name, needed in (("train", config.train_batch_size), ("val", 1)):
        if len(splits[name]) < needed:
            raise InputError(
                f"at least {needed} {name} rows" + (", one batch (data.train_batch_size)" if name == "train" else ""),
                f"{len(splits[name])} rows, {dropped[name]} dropped for their length",
                f"data.source={config.source}",
                "give more rows, "
                + ("a smaller data.train_batch_size " if name == "train" else "")
                + "or a larger data.max_prompt_length",
            )


def _check_disjoint(train: list[Row], val: list[Row]) -> None:
    trained = {canonical(row["prompt"]): number for number, row in enumerate(train, start=1)}
    for number, row in enumerate(val, start=1):
        if same := trained.get(canonical(row["prompt"])):
            raise InputError(
                "held-out prompts that are not trained on",
                f"val row {number} has the prompt of train row {same}",
                "the prepared rows",
                "remove it from one of the two sets of rows",
            )
