"""Scores of trajectories as they end, and as columns of a batch."""

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rl_core.data.protocol import DataProto
from rl_core.rewards.runner import RewardRunner
from rl_core.rewards.worker import RewardResult, failure
from rl_core.rollout.trajectory import Trajectory, TrajectoryState


class TrajectoryScorer:
    """Shows each trajectory that has ended to the scorers of its row."""

    def __init__(self, runner: RewardRunner, tokenizer: PreTrainedTokenizerBase) -> None:
        """The runner is started and closed by whoever made it."""
        self.runner, self.tokenizer = runner, tokenizer

    async def score(self, trajectory: Trajectory) -> RewardResult:
        """The result of the last turn as text, without special tokens; a trajectory that failed is not shown.

        Raises what `RewardRunner.score` does.
        """
        if trajectory.state is TrajectoryState.FAILED:
            return failure("error", f"the rollout failed: {trajectory.stop_reason}: {trajectory.detail}")
        seen = self._seen(trajectory) if self.runner.reads_trajectory(trajectory.row) else None
        response = self._text(trajectory.response_ids[trajectory.answer_start :])
        return await self.runner.score(response, trajectory.row, seen)

    def _text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _seen(self, trajectory: Trajectory) -> dict[str, Any]:
        """The trajectory as its scorer reads it (docs/rewards.md)."""
        messages = [
            {**message, "content": self._text(message["token_ids"])} if "token_ids" in message else message
            for message in trajectory.messages
        ]
        return {
            "messages": [{"role": message["role"], "content": message["content"]} for message in messages],
            "turns": trajectory.turns,
            "calls": trajectory.calls,
            "stop_reason": trajectory.stop_reason,
            "reward": trajectory.reward,
            "response_tokens": len(trajectory.response_ids),
        }


def score_columns(results: list[RewardResult], wait_s: float) -> DataProto:
    """`score` (NaN without one), `score_seconds`, `score_wait` [B] float32, and `score_status`, `score_detail` and
    `named` (rewards by name) per row.

    `score_wait` is how long the whole call waited for scores once its last trajectory had ended, in seconds.
    """
    tensors = {
        "score": [torch.nan if result.score is None else result.score for result in results],
        "score_seconds": [result.seconds for result in results],
        "score_wait": [wait_s] * len(results),
    }
    others: dict[str, list[Any]] = {
        "score_status": [result.status for result in results],
        "score_detail": [result.detail for result in results],
        "named": [result.named for result in results],
    }
    batch = {name: torch.tensor(values, dtype=torch.float32) for name, values in tensors.items()}
    return DataProto.from_dict(batch, others)


def results_of(batch: DataProto) -> list[RewardResult]:
    """The results that `score_columns` wrote."""
    columns = batch.non_tensor_batch
    scores, seconds = batch.batch["score"].tolist(), batch.batch["score_seconds"].tolist()
    rows = zip(scores, columns["score_status"], columns["score_detail"], columns["named"], seconds, strict=True)
    return [RewardResult(score if status == "ok" else None, status, *others) for score, status, *others in rows]
