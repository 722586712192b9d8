"""Scorer for reasoning-gym problems: applies the scoring rule of each task."""

import json
from typing import Any

from reasoning_gym import get_score_answer_fn
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from rl_core.data.sources.reasoning_gym import evaluates_text
from rl_core.rewards.scorers import BrokenTruth, Row

MAX_ANSWER = 10_000
"""Maximum length of an answer in characters, including its tags."""


def reasoning_gym(response: str, row: Row) -> float:
    """The task's score (0 to 1) for the text between the last <answer> and </answer>, or for an empty answer.

    Raises BrokenTruth for rows of another source, and for a task that may run the answer as a program.
    """
    task, entry = true_problem(row)
    start = response.rfind("<answer>")
    answer = response[start:][:MAX_ANSWER] if start >= 0 else ""
    return float(get_score_answer_fn(task)(extract_answer(answer), entry))


def true_problem(row: Row) -> tuple[str, dict[str, Any]]:
    """Task and entry of a row of the source reasoning_gym; raises BrokenTruth for any other row."""
    extra = row.get("extra_info") or {}
    task = extra.get("task")
    if not isinstance(task, str) or task not in DATASETS:
        raise BrokenTruth("extra_info.task is not a task of reasoning-gym")
    if evaluates_text(task):
        raise BrokenTruth(f"task {task} may run an answer as a program")
    try:
        entry = json.loads(extra["entry"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BrokenTruth(f"extra_info.entry is not JSON: {type(error).__name__}: {error}") from error
    if not isinstance(entry, dict):
        raise BrokenTruth("extra_info.entry is not a JSON object")
    return task, entry
