"""Scorers: functions that map a response and its row to a score.

They run in separate processes, so this module has light imports only.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from rl_core.data.sources import NO_SOURCE, load_source, source_names
from rl_core.errors import InputError, near_names
from rl_core.rewards.numbers import Number, first_number, last_number, whole_number

Row = dict[str, Any]
Scorer = Callable[..., Any]
"""Called with a response, its row and, if it takes a third argument, its trajectory; may be asynchronous."""


class BrokenTruth(ValueError):
    """The ground truth of a row is not what its scorer needs: an error of the row, whatever the response."""


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
    return _equal(last_number(response), true_number(row))


def gsm8k(response: str, row: Row) -> float:
    """1 if the number after the last `####` equals the ground truth; 0 without such a number."""
    _, mark, answer = response.rpartition("####")
    return _equal(first_number(answer) if mark else None, true_number(row))


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
NAMED_REWARDS = {"code": ("tests_passed",)}
"""Names of the further rewards that a built-in scorer returns."""
TRUTHS: dict[str, str] = {
    "numeric": "rl_core.rewards.scorers:true_number",
    "gsm8k": "rl_core.rewards.scorers:true_number",
    "code": "rl_core.rewards.code:true_tests",
    "reasoning_gym": "rl_core.rewards.reasoning:true_problem",
}
"""Functions that read the ground truth of a row for a scorer, and raise BrokenTruth if it is unusable."""


def is_builtin(name: str) -> bool:
    """Whether a scorer belongs to the project; others are functions `package.module:function` named by a setting."""
    return ":" not in name


@functools.lru_cache(maxsize=1024)
def known_scorer(name: str) -> str | None:
    """The built-in scorer with this name, or of the data source with this name; None if there is neither."""
    if name in SCORERS or name in LAZY:
        return name
    return load_source(name).SCORER if name in source_names() else None


@functools.lru_cache(maxsize=256)
def resolve_scorer(name: str, where: str = "reward.function") -> Scorer:
    """Scorer function for a scorer's name, a data source's name or `package.module:function`.

    The name must come from a setting, never from a row: it may import any module. Raises InputError if the scorer does
    not exist.
    """
    if not is_builtin(name):
        return _import_scorer(name, where)
    scorer = known_scorer(name)
    if scorer is None:
        raise unknown_scorer(name, where)
    return SCORERS[scorer] if scorer in SCORERS else _import_scorer(LAZY[scorer], where)


def unknown_scorer(name: str, where: str) -> InputError:
    """The error for a name, of a setting or of a row's data_source, that is not that of a scorer."""
    names = list(dict.fromkeys([*SCORERS, *LAZY, *(name for name in source_names() if load_source(name).SCORER)]))
    nearest = near_names(name, names)
    return InputError(
        f"a scorer ({', '.join(names)})" + " or package.module:function" * where.startswith("reward."),
        f"'{name}'" + ", the value for rows without a data_source" * (name == NO_SOURCE),
        where,
        (f"did you mean {' or '.join(nearest)}? " if nearest else "")
        + "Set reward.function to the scorer of all rows, or reward.sources=[NAME=SCORER] to the scorer of the rows "
        "with this data_source",
    )


def check_truth(name: str, row: Row) -> None:
    """Raises BrokenTruth if a scorer cannot use the row's ground truth."""
    if scorer := TRUTHS.get(name):
        _import_scorer(scorer, "rl_core/rewards/scorers.py")(row)


@functools.lru_cache(maxsize=256)
def wants_trajectory(name: str) -> bool:
    """Whether the named scorer takes the trajectory as third argument; False if it cannot be resolved."""
    if is_builtin(name):
        return False  # without importing LAZY modules, which only the scoring processes load
    try:
        parameters = inspect.signature(resolve_scorer(name)).parameters.values()
    except (InputError, ValueError, TypeError):  # errors are reported per response; some builtins have no signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [each for each in parameters if each.default is each.empty or each.name == "trajectory"]
    return sum(each.kind in positional for each in needed) > 2


@functools.lru_cache(maxsize=256)
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


def true_number(row: Row) -> Number:
    """The row's ground truth as a number; raises BrokenTruth if it is not one number."""
    return _number(truth_of(row))


@functools.lru_cache(maxsize=1024)
def _number(truth: str) -> Number:
    number = whole_number(truth)
    if number is None:
        raise BrokenTruth(f"ground truth {truth[:80]!r} is not one number, such as 1,234.5, -1/2, 1 1/2 or 50%")
    return number


def _equal(answer: Number | None, truth: Number) -> float:
    return float(answer is not None and answer.equals(truth))
