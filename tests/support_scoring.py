"""Many responses through real scoring processes at the same time, and results that were given instead."""

import asyncio
from collections.abc import Sequence
from typing import Any

from rl_core.config.schema import RewardConfig
from rl_core.data.protocol import DataProto
from rl_core.rewards.runner import RewardResult, RewardRunner
from rl_core.rollout.scoring import score_columns


def scored(responses: Sequence[str], rows: Sequence[dict[str, Any]], **settings: Any) -> list[RewardResult]:
    """The result of each response, by scoring processes of their own."""

    async def work() -> list[RewardResult]:
        async with RewardRunner(RewardConfig(**settings)) as scoring:
            return await score_all(scoring, responses, rows)

    return asyncio.run(work())


async def score_all(
    scoring: RewardRunner, responses: Sequence[str], rows: Sequence[dict[str, Any]]
) -> list[RewardResult]:
    """The result of each response; all are asked for at once."""
    return await asyncio.gather(*(scoring.score(*pair) for pair in zip(responses, rows, strict=True)))


def with_results(batch: DataProto, results: list[RewardResult]) -> DataProto:
    """A batch as it comes out of rollouts whose trajectories had these results."""
    return batch.union(score_columns(results, 0.0))
