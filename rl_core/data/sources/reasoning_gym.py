"""Made problems of the package reasoning-gym: `data.tasks` names its data sets, whose own defaults set the size."""

import difflib
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any

from rl_core.config.data import SourceConfig
from rl_core.data.rows import Row, canonical, make_row
from rl_core.errors import InputError

SCORER = "reasoning_gym"
TRAIN_ROWS, VAL_ROWS = 4096, 256
INSTRUCTION = "Reason step by step and put the final answer between <answer> and </answer>."
ENOUGH = 50
"""Made problems for each row that is wanted, before a task counts as one that has no more."""

_EVALUATES = re.compile(r"(?<![\w.])(eval|exec|compile|simplify|S)\(|parse_expr|sympify|parse_latex|pickle")


def rows(config: SourceConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """Training rows and held-out rows, the tasks in turn; no prompt is in both splits, nor twice in the held-out ones.

    Raises InputError when the package is missing, a task is unknown, evaluates text or has not enough problems.
    """
    _check_tasks(config.tasks)
    val = _draw(config.tasks, "val", 2 * seed + 1, config.val_rows or VAL_ROWS, set())
    held_out = {row["prompt"][0]["content"] for row in val}
    return _draw(config.tasks, "train", 2 * seed, config.train_rows or TRAIN_ROWS, held_out), val


def reference_response(row: Row) -> str:
    """The package's answer between the tags."""
    return f"<answer>{row['extra_info']['answer']}</answer>"


@functools.cache
def evaluates_text(task: str) -> bool:
    """Whether the code of the task may run an answer as a program, as that of some does."""
    from reasoning_gym.factory import DATASETS

    modules = {cls.__module__ for cls in DATASETS[task][0].__mro__ if cls.__module__.startswith("reasoning_gym.")}
    return any(_EVALUATES.search(inspect.getsource(sys.modules[module])) for module in modules)


def _draw(tasks: tuple[str, ...], split: str, seed: int, count: int, without: set[str]) -> list[Row]:
    made: list[Row] = []
    seen = set(without)
    problems = {task: _problems(task, seed, ENOUGH * (count // len(tasks) + 1)) for task in tasks}
    for task in itertools.islice(itertools.cycle(tasks), count):
        for entry in problems[task]:
            prompt = f"{entry['question'].strip()}\n{INSTRUCTION}"
            if prompt not in seen:
                break
        else:
            fix = f"lower data.{split}_rows or name further tasks in data.tasks"
            raise InputError(f"{count} {split} rows", f"only {len(made)}: task {task} has no more", "data.tasks", fix)
        if split == "val":
            seen.add(prompt)
        row = make_row("reasoning_gym", prompt, task, str(entry["answer"]), str(entry["answer"]), split, len(made))
        # As text: the metadata of tasks differ, and columns of a file have one type.
        row["extra_info"] |= {"task": task, "entry": canonical(entry)}
        made.append(row)
    return made


def _problems(task: str, seed: int, most: int) -> Iterator[dict[str, Any]]:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, seed=seed * 1_000_003, size=most)
    # Not `iter(dataset)`, which begins again with each loop over it.
    return (dataset[i] for i in range(most))


def _check_tasks(tasks: tuple[str, ...]) -> None:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        seen, fix = f"{type(error).__name__}: {error}", "pip install 'rollforward[reasoning]'"
        raise InputError("the package reasoning-gym", seen, "data.source=reasoning_gym", fix) from error
    if not tasks:
        fix = "name some, as in 'data.tasks=[leg_counting,chain_sum]'"
        raise InputError("names of tasks", "none", "data.tasks", fix)
    for task in tasks:
        if task not in DATASETS:
            nearest = difflib.get_close_matches(task, DATASETS, cutoff=0.4) or ["leg_counting", "chain_sum"]
            raise InputError("a task of reasoning-gym", f"'{task}'", "data.tasks", f"take {' or '.join(nearest)}")
        if evaluates_text(task):
            seen = f"'{task}', whose code evaluates text"
            raise InputError("a task that does not run an answer as a program", seen, "data.tasks", "take another one")
