"""Rows of a data set: their layout and their one form as text."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rl_core.errors import InputError

Row = dict[str, Any]
"""One problem: data_source, prompt (messages), ability, reward_model {style, ground_truth}, extra_info."""
Found = Row | InputError
"""A row, or why there is none."""


def make_row(source: str, question: str, ability: str, ground_truth: str, answer: str, split: str, index: int) -> Row:
    """A row with one user message; `answer` is the text that a perfect model would give."""
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
    """What `to_row` makes of the first `count` records (None: all), given split, number and where the record stands.

    A record that is none, or of which no row can be made, gives the InputError that says so.
    """
    for index, (record, where) in enumerate(itertools.islice(records, count)):
        try:
            yield record if isinstance(record, InputError) else to_row(record, split, index, where)
        except InputError as error:
            yield error


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces, ASCII only; values that JSON lacks (dates, bytes) by their text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
