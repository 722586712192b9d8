"""The user's own parquet files, checked row by row."""

from rl_core.config.schema import DataConfig
from rl_core.data.rows import Row, read_rows
from rl_core.errors import InputError

SCORER = None
REQUIRED = ("data_source", "prompt", "reward_model")


def rows(config: DataConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """The first rows of both files; the order is the files', so the seed changes nothing.

    Raises InputError naming file, row and fix when a file is missing, empty or has a row of another form.
    """
    if not config.path or not config.val_path:
        raise InputError(
            "data.path and data.val_path",
            f"data.path={config.path}, data.val_path={config.val_path}",
            "data.source=files",
            "give a file of training rows and one of held-out rows",
        )
    return _split(config.path, "train", config.train_rows), _split(config.val_path, "val", config.val_rows)


def reference_response(row: Row) -> str:
    """`extra_info.answer` where there is one, otherwise the ground truth."""
    answer = row["extra_info"].get("answer")
    return row["reward_model"]["ground_truth"] if answer is None else str(answer)


def _split(file: str, split: str, count: int | None) -> list[Row]:
    found = read_rows(file)[:count]
    missing = [column for column in REQUIRED if column not in found[0]]
    if missing:
        raise InputError(
            f"the columns {', '.join(REQUIRED)}",
            f"no column {', '.join(missing)}; there are {', '.join(sorted(found[0]))}",
            file,
            f"add or rename the column {missing[0]}",
        )
    return [_checked(row, split, index, f"{file}, row {index + 1}") for index, row in enumerate(found)]


def _checked(row: Row, split: str, index: int, where: str) -> Row:
    """The row with everything optional filled in."""
    source, extra = row["data_source"], row.get("extra_info") or {}
    if not isinstance(source, str) or not source:
        raise InputError("a text in data_source", repr(source), where, "name the scorer or source that scores the row")
    if not isinstance(extra, dict):
        raise InputError("a struct in extra_info", repr(extra)[:80], where, "make extra_info a struct or leave it out")
    known = {name: value for name, value in extra.items() if value is not None}
    return {
        **row,
        "prompt": _messages(row["prompt"], where),
        "ability": row.get("ability") or "",
        "reward_model": _reward_model(row["reward_model"], where),
        "extra_info": {**extra, "split": known.get("split", split), "index": known.get("index", index)},
    }


def _messages(prompt: object, where: str) -> list[dict[str, str]]:
    fix = 'write prompt as [{"role": "user", "content": "…"}]'
    if not isinstance(prompt, list) or not prompt:
        seen = "an empty list" if prompt == [] else repr(prompt)[:80]
        raise InputError("a non-empty list of messages in prompt", seen, where, fix)
    for message in prompt:
        values = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(value, str) and value for value in values):
            raise InputError("messages of {role, content}, both texts", repr(message)[:80], where, fix)
    return prompt


def _reward_model(reward_model: object, where: str) -> dict[str, object]:
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    # NaN is what data-frame tools write for a missing value.
    if not isinstance(truth, str | int | float) or truth != truth or not str(truth).strip():
        raise InputError(
            "reward_model.ground_truth, a text or number",
            repr(reward_model)[:80],
            where,
            'write reward_model as {"style": "rule", "ground_truth": "…"}; structured answers belong in extra_info',
        )
    assert isinstance(reward_model, dict)
    return {**reward_model, "style": reward_model.get("style") or "rule", "ground_truth": str(truth)}
