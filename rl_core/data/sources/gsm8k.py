"""Grade-school word problems (GSM8K): `question` and an `answer` that ends in `#### number`."""

from collections.abc import Iterator

from rl_core.config.data import SourceConfig
from rl_core.data.rows import Found, Row, make_row, rows_of
from rl_core.data.splits import one_folder, read_split
from rl_core.errors import InputError

SCORER = "gsm8k"
DEFAULT_PATH = "hf://datasets/openai/gsm8k/main"
INSTRUCTION = "Reason step by step and end with a line of `#### ` and the number."


def rows(config: SourceConfig, seed: int) -> tuple[Iterator[Found], Iterator[Found]]:
    """The first rows of the data set's two splits, in file order; the seed is not used.

    An invalid record gives an InputError in its place. Raises InputError if the files are missing.
    """
    path = one_folder(config) or DEFAULT_PATH
    return _split(path, "train", "train", config.train_rows), _split(path, "test", "val", config.val_rows)


def reference_response(row: Row) -> str:
    """The data set's worked answer."""
    answer: str = row["extra_info"]["answer"]
    return answer


def _split(path: str, name: str, split: str, count: int | None) -> Iterator[Found]:
    try:
        records = read_split(path, name)
    except Exception as error:
        if path != DEFAULT_PATH:
            raise
        # Offline, a missing package, an unknown address: with the default path, all have the same fix.
        raise InputError(
            expected=f"access to {path}, because data.path is unset",
            seen=f"{type(error).__name__}: {error}",
            where="data.source=gsm8k",
            fix=f"set data.path=FOLDER to a local folder with {name}.jsonl or {name}.parquet; or allow the download "
            "with HF_HUB_OFFLINE=0 in the environment",
        ) from error
    return rows_of(records, split, count, _to_row)


def _to_row(record: Row, split: str, index: int, where: str) -> Row:
    question, answer = record.get("question"), record.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str) or not question.strip():
        raise InputError("strings `question` and `answer`", f"columns {sorted(record)}", where, "correct the row")
    number = answer.rpartition("####")[2].strip().replace(",", "")
    if "####" not in answer or not number:
        raise InputError("an `answer` that ends in `#### number`", answer[-80:], where, "correct the row")
    return make_row("gsm8k", f"{question}\n{INSTRUCTION}", "math", number, answer, split, index)
