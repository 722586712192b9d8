"""Score of the best constant answer: what a policy gets that gives the same answer to every held-out prompt."""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from rl_core.config.schema import RewardConfig, RunConfig
from rl_core.data.rows import Row
from rl_core.rewards.judge import JUDGE
from rl_core.rewards.row_check import plain_trajectory
from rl_core.rewards.runner import RewardRunner, scorers_of
from rl_core.rewards.scorers import is_builtin, truth_of
from rl_core.runtime.watchdog import progress

TRUTHS = 3
"""Number of the most frequent ground truths that are tried as answers."""
FORMS = ("{}", "#### {}", "\\boxed{{{}}}")
"""Forms in which a ground truth is tried."""
MAX_ROWS = 1000
"""Number of held-out rows on which constant answers are scored, evenly spaced: mixtures are stored source by source."""
MAX_OWN_ROWS = 200
"""The same for scorers of the user's, which may be slow."""
MAX_S = 300.0
"""Maximum time for all scores."""
CHUNK = 64
"""Responses in progress at a time; after each chunk the scoring ends if one of them has no score."""


def constant_score(config: RunConfig, rows: Sequence[Row]) -> float | None:
    """Highest mean score of an empty answer and of frequent ground truths, each given to every row.

    None if that cannot be computed: rewards that are not those of scorers alone, scorers that query a judge or run
    programs, responses without a score, and scorers that are too slow.
    """
    rows = _spaced(rows, MAX_ROWS)
    used = {name for row in rows for name in scorers_of(config.reward, row)}
    if not rows or config.multi_turn or config.reward.model.path or used & {JUDGE, "code"}:
        return None
    if not all(map(is_builtin, used)):
        rows = _spaced(rows, MAX_OWN_ROWS)
    truths = [truth for truth, _ in Counter(map(truth_of, rows)).most_common(TRUTHS)]
    answers = ["", *(form.format(truth) for truth in truths for form in FORMS)]
    try:
        return asyncio.run(_best(config.reward, answers, rows))
    except TimeoutError:
        return None


def _spaced(rows: Sequence[Row], count: int) -> Sequence[Row]:
    """At most `count` evenly spaced rows."""
    return rows[:: max(math.ceil(len(rows) / count), 1)]


async def _best(config: RewardConfig, answers: Sequence[str], rows: Sequence[Row]) -> float | None:
    """Highest mean score of an answer; None at the first response without a score. Raises TimeoutError."""

    async def score(answer: str, row: Row) -> float | None:
        result = await runner.score(answer, row, plain_trajectory(answer))
        progress()
        return result.score

    means = []
    async with RewardRunner(config) as runner, asyncio.timeout(MAX_S):
        for answer in answers:
            scores: list[float] = []
            for begin in range(0, len(rows), CHUNK):
                found = await asyncio.gather(*(score(answer, row) for row in rows[begin : begin + CHUNK]))
                scores += [each for each in found if each is not None]
                if len(scores) < begin + len(found):
                    return None
            means.append(fmean(scores))
    return max(means)
