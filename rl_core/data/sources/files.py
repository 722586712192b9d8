"""The user's own files, in any of the layouts of rl_core/data/layouts.py."""

from collections.abc import Iterator
from functools import partial

from rl_core.config.data import SourceConfig
from rl_core.data.files import Paths, read_records
from rl_core.data.layouts import COLUMNS, check_columns, to_row
from rl_core.data.rows import Found, Row, rows_of
from rl_core.errors import InputError

SCORER = None


def rows(config: SourceConfig, seed: int) -> tuple[Iterator[Found], Iterator[Found]]:
    """The first rows of both splits' files, in file order; the seed is not used.

    A record of no layout gives an InputError in its place. Raises InputError if a file is missing, empty or damaged,
    or lacks columns.
    """
    if not config.path or not config.val_path:
        raise InputError(
            "data.path and data.val_path",
            f"data.path={config.path}, data.val_path={config.val_path}",
            "data.source=files",
            "set data.path to the files of training rows and data.val_path to those of held-out rows",
        )
    return _split(config, config.path, "train", config.train_rows), _split(
        config, config.val_path, "val", config.val_rows
    )


def reference_response(row: Row) -> str:
    """`extra_info.answer` if present, otherwise the ground truth."""
    answer = row["extra_info"].get("answer")
    return row["reward_model"]["ground_truth"] if answer is None else str(answer)


def _split(config: SourceConfig, path: Paths, split: str, count: int | None) -> Iterator[Found]:
    records = read_records(path, COLUMNS.union(config.columns), partial(check_columns, further=config.columns))
    return rows_of(records, split, count, partial(to_row, columns=config.columns))
