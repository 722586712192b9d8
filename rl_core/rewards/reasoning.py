"""Scorer for reasoning-gym problems: applies the scoring rule of each task."""

import json

from reasoning_gym import get_score_answer_fn
from reasoning_gym.utils import extract_answer

from rl_core.data.sources.reasoning_gym import evaluates_text
from rl_core.rewards.scorers import Row

MAX_ANSWER = 10_000
"""Maximum length of an answer in characters, including its tags."""


def reasoning_gym(response: str, row: Row) -> float:
    """The task's score (0 to 1) for the text between the last <answer> and </answer>, or for an empty answer.

    Raises ValueError for a task that may run the answer as a program.
    """
    task, entry = row["extra_info"]["task"], json.loads(row["extra_info"]["entry"])
    if evaluates_text(task):
        raise ValueError(f"task {task} may run an answer as a program")
    start = response.rfind("<answer>")
    answer = response[start:][:MAX_ANSWER] if start >= 0 else ""
    return float(get_score_answer_fn(task)(extract_answer(answer), entry))
