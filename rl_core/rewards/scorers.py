"""Scorers: functions of a response and its row that give a number.

They run in processes of their own, so this module imports nothing heavy.
"""

import difflib
import functools
import importlib
import inspect
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from rl_core.data.sources import NO_SOURCE, load_source, source_names
from rl_core.errors import InputError

Row = dict[str, Any]
Scorer = Callable[..., Any]
"""Of a response, its row and, where it takes a third argument, its trajectory; it may be asynchronous."""

WINDOW = 1000
"""Characters at the end of a response in which a number is looked for."""
# A sign counts only where it is not a minus between two values. Each part matches in one way: nothing backtracks far.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]])(?P<sign>[-+\u2212]))?(?:\$(?P<inner>[-+\u2212]?))?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?P<power>[eE][-+]?[0-9]{1,9})?"
)


def exact(response: str, row: Row) -> float:
    """1 when the response is the ground truth, white space aside."""
    return float(_characters(response) == _characters(truth_of(row)))


def positions(response: str, row: Row) -> float:
    """Share of the ground truth's characters that the response has in the same place, white space aside; what follows
    them does not count."""
    truth = _characters(truth_of(row))
    right = sum(character == wanted for character, wanted in zip(_characters(response), truth, strict=False))
    return right / max(len(truth), 1)


def numeric(response: str, row: Row) -> float:
    """1 when the last number of the response equals the ground truth."""
    return float(_last_number(_window(response)) == _true_number(row))


def gsm8k(response: str, row: Row) -> float:
    """1 when the number after the last `####` equals the ground truth; 0 without such a number."""
    _, mark, answer = _window(response).rpartition("####")
    match = _NUMBER.search(answer) if mark else None
    return float(match is not None and _value(match) == _true_number(row))


def none(response: str, row: Row) -> float:
    """0: another judge gives the whole score."""
    return 0.0


SCORERS: dict[str, Scorer] = {
    "none": none,
    "judge": none,
    "exact": exact,
    "positions": positions,
    "numeric": numeric,
    "gsm8k": gsm8k,
}
LAZY: dict[str, str] = {
    "math": "rl_core.rewards.mathematics:boxed",
    "code": "rl_core.rewards.code:code",
    "reasoning_gym": "rl_core.rewards.reasoning:reasoning_gym",
}
"""Scorers whose modules load much, and are imported when first used."""


@functools.lru_cache(maxsize=256)
def resolve_scorer(name: str, where: str = "reward.function") -> Scorer:
    """The function for a scorer's name, a source's name or `package.module:function`.

    Raises InputError with the nearest names when there is none.
    """
    if name in SCORERS:
        return SCORERS[name]
    if ":" in name:
        return _import_scorer(name, where)
    if name in LAZY:
        return _import_scorer(LAZY[name], where)
    if name in source_names() and (scorer := load_source(name).SCORER):
        return resolve_scorer(scorer, where)
    names = list(dict.fromkeys([*SCORERS, *LAZY, *(name for name in source_names() if load_source(name).SCORER)]))
    unnamed = name == NO_SOURCE
    nearest = [] if unnamed else difflib.get_close_matches(name, names, cutoff=0.4)
    raise InputError(
        f"a scorer among {', '.join(names)}, or package.module:function",
        f"'{name}'" + ", which stands for rows without a data_source" * unnamed,
        where,
        (f"did you mean {' or '.join(nearest)}? " if nearest else "")
        + "Set reward.function to the scorer of all rows, or name it in the rows' data_source",
    )


@functools.lru_cache(maxsize=256)
def wants_trajectory(name: str) -> bool:
    """Whether the scorer of that name takes a third argument; one that cannot be had does not."""
    if name in SCORERS or name in LAZY:
        return False  # their modules are for the scoring processes alone
    try:
        if name in source_names():
            return wants_trajectory(load_source(name).SCORER or "none")
        parameters = inspect.signature(resolve_scorer(name)).parameters.values()
    except (InputError, ValueError, TypeError):  # reported with each response; some builtins have no signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [each for each in parameters if each.default is each.empty or each.name == "trajectory"]
    return sum(each.kind in positional for each in needed) > 2


def _import_scorer(name: str, where: str) -> Scorer:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way while it is imported
        seen = f"'{name}' ({type(error).__name__}: {error})"
        fix = "check the spelling and that its folder is on PYTHONPATH"
        raise InputError("package.module:function that can be imported", seen, where, fix) from error
    if not callable(found):
        raise InputError("a function", f"'{name}' is a {type(found).__name__}", where, "name a function of the module")
    scorer: Scorer = found
    return scorer


def _characters(text: str) -> str:
    return "".join(text.split())


def truth_of(row: Row) -> str:
    """The row's ground truth."""
    return str(row["reward_model"]["ground_truth"])


def _true_number(row: Row) -> Decimal:
    number = _last_number(_window(truth_of(row)))
    if number is None:
        raise ValueError(f"ground truth {truth_of(row)[:80]!r} is not a number")
    return number


def _window(text: str) -> str:
    # A number that is cut by the window's start must not be read as another one.
    return text if len(text) <= WINDOW else text[-WINDOW:].lstrip("0123456789.,")


def _last_number(text: str) -> Decimal | None:
    matches = list(_NUMBER.finditer(text))
    return _value(matches[-1]) if matches else None


def _value(match: re.Match[str]) -> Decimal:
    number = Decimal(match["digits"].replace(",", "") + (match["power"] or ""))
    return -number if (match["sign"] or match["inner"]) in ("-", "\u2212") else number
