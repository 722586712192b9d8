"""Scorers: functions that map a response and its row to a score.

They run in separate processes, so this module has light imports only.
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
"""Called with a response, its row and, if it takes a third argument, its trajectory; may be asynchronous."""

WINDOW = 1000
"""Number of characters at the end of a response that are searched for a number."""
# A sign between two values is an operator, not a sign. Every part matches in one way only, so backtracking is bounded.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]])(?P<sign>[-+\u2212]))?(?:\$(?P<inner>[-+\u2212]?))?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?P<power>[eE][-+]?[0-9]{1,9})?"
)


def exact(response: str, row: Row) -> float:
    """1 if the response equals the ground truth, ignoring white space."""
    return float(_characters(response) == _characters(truth_of(row)))


def positions(response: str, row: Row) -> float:
    """Share of the ground truth's characters that the response has at the same position, ignoring white space; text
    beyond the length of the ground truth is ignored."""
    truth = _characters(truth_of(row))
    correct = sum(actual == expected for actual, expected in zip(_characters(response), truth, strict=False))
    return correct / max(len(truth), 1)


def numeric(response: str, row: Row) -> float:
    """1 if the last number in the response equals the ground truth."""
    return float(_last_number(_window(response)) == _true_number(row))


def gsm8k(response: str, row: Row) -> float:
    """1 if the number after the last `####` equals the ground truth; 0 without such a number."""
    _, mark, answer = _window(response).rpartition("####")
    match = _NUMBER.search(answer) if mark else None
    return float(match is not None and _value(match) == _true_number(row))


def none(response: str, row: Row) -> float:
    """Always 0: the score comes from elsewhere (reward model, extra scorers, tools or environment)."""
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
"""Scorers in modules with heavy imports, which are imported on first use."""


@functools.lru_cache(maxsize=256)
def resolve_scorer(name: str, where: str = "reward.function") -> Scorer:
    """Scorer function for a scorer's name, a data source's name or `package.module:function`.

    Raises InputError with the most similar names if it does not exist.
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
    has_no_source = name == NO_SOURCE
    nearest = [] if has_no_source else difflib.get_close_matches(name, names, cutoff=0.4)
    raise InputError(
        f"a scorer ({', '.join(names)}) or package.module:function",
        f"'{name}'" + ", the value for rows without a data_source" * has_no_source,
        where,
        (f"did you mean {' or '.join(nearest)}? " if nearest else "")
        + "Set reward.function to the scorer of all rows, or name it in the rows' data_source",
    )


@functools.lru_cache(maxsize=256)
def wants_trajectory(name: str) -> bool:
    """Whether the named scorer takes the trajectory as third argument; False if it cannot be resolved."""
    if name in SCORERS or name in LAZY:
        return False  # without importing LAZY modules, which only the scoring processes load
    try:
        if name in source_names():
            return wants_trajectory(load_source(name).SCORER or "none")
        parameters = inspect.signature(resolve_scorer(name)).parameters.values()
    except (InputError, ValueError, TypeError):  # errors are reported per response; some builtins have no signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [each for each in parameters if each.default is each.empty or each.name == "trajectory"]
    return sum(each.kind in positional for each in needed) > 2


def _import_scorer(name: str, where: str) -> Scorer:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # importing a user's module can raise anything
        seen = f"'{name}' ({type(error).__name__}: {error})"
        fix = "check the spelling and that its folder is on PYTHONPATH"
        raise InputError("an importable package.module:function", seen, where, fix) from error
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
    # Drop a number cut off by the start of the window: it would be read as a different number.
    return text if len(text) <= WINDOW else text[-WINDOW:].lstrip("0123456789.,")


def _last_number(text: str) -> Decimal | None:
    matches = list(_NUMBER.finditer(text))
    return _value(matches[-1]) if matches else None


def _value(match: re.Match[str]) -> Decimal:
    number = Decimal(match["digits"].replace(",", "") + (match["power"] or ""))
    return -number if (match["sign"] or match["inner"]) in ("-", "\u2212") else number
