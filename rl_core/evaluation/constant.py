"""Score of the best constant answer: what a policy gets that gives the same answer to every held-out prompt."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from rl_core.config.schema import RewardConfig, RunConfig
from rl_core.data.rows import Row
from rl_core.rewards.judge import JUDGE
from rl_core.rewards.row_check import plain_trajectory
from rl_core.rewards.runner import RewardRunner, scorers_of
from rl_core.rewards.scorers import truth_of

TRUTHS = 3
"""Number of the most frequent ground truths that are tried as answers."""
FORMS = ("{}", "#### {}", "\\boxed{{{}}}")
"""Forms in which a ground truth is tried."""
MAX_ROWS = 1000
"""Number of held-out rows on which constant answers are scored."""


def constant_score(config: RunConfig, rows: Sequence[Row]) -> float | None:
    """Highest mean score of an empty answer and of frequent ground truths, each given to every row.

    None if that cannot be computed: rewards that are not those of scorers alone, scorers that query a judge or run
    programs, and responses without a score.
    """
    rows = rows[:MAX_ROWS]
    used = {name for row in rows for name in scorers_of(config.reward, row)}
    if config.multi_turn or config.reward.model.path or used & {JUDGE, "code"}:
        return None
    truths = [truth for truth, _ in Counter(map(truth_of, rows)).most_common(TRUTHS)]
    answers = ["", *(form.format(truth) for truth in truths for form in FORMS)]
    found = asyncio.run(_scores(config.reward, answers, rows))
    scores = [[score for score in each if score is not None] for each in found]
    complete = all(len(each) == len(rows) for each in scores)
    return max(map(fmean, scores)) if rows and complete else None


async def _scores(config: RewardConfig, answers: Sequence[str], rows: Sequence[Row]) -> list[list[float | None]]:
    """The score of each answer [answers, rows]."""
    async with RewardRunner(config) as runner:
        results = [
            await asyncio.gather(*(runner.score(answer, row, plain_trajectory(answer)) for row in rows))
            for answer in answers
        ]
    return [[result.score for result in each] for each in results]
