"""Rows of a data set: their layout and canonical text form."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rl_core.errors import InputError

Row = dict[str, Any]
"""One problem: data_source, prompt (messages), ability, reward_model {style, ground_truth}, extra_info."""
Found = Row | InputError
"""A row, or the error that explains why it is invalid."""


class NotScored(InputError):
    """No scorer scores the row; unlike other errors of a row, this stops a run whatever `data.drop` lists."""


def make_row(source: str, question: str, ability: str, ground_truth: str, answer: str, split: str, index: int) -> Row:
    """A row with one user message; `answer` is the response of a perfect model."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, "answer": answer},
    }


def rows_of(
    records: Iterable[tuple[Found, str]], split: str, count: int | None, to_row: Callable[[Row, str, int, str], Row]
) -> Iterator[Found]:
    """`to_row(record, split, index, location)` of the first `count` records (None: all).

    An invalid record, or one that cannot be converted, gives an InputError in its place.
    """
    for index, (record, where) in enumerate(itertools.islice(records, count)):
        try:
            yield record if isinstance(record, InputError) else to_row(record, split, index, where)
        except InputError as error:
            yield error


def canonical(value: Any) -> str:
    """ASCII JSON with sorted keys and no spaces; other values (dates, bytes) are converted to strings."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
