"""Scores trajectories as they end, and stores the scores as columns of a batch."""

from math import isnan
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rl_core.data.protocol import DataProto
from rl_core.rewards.runner import RewardRunner
from rl_core.rewards.worker import RewardResult, failure
from rl_core.rollout.trajectory import Trajectory, TrajectoryState


class TrajectoryScorer:
    """Scores each finished trajectory with the scorers of its row."""

    def __init__(self, runner: RewardRunner, tokenizer: PreTrainedTokenizerBase) -> None:
        """The caller starts and closes the runner."""
        self.runner, self.tokenizer = runner, tokenizer

    async def score(self, trajectory: Trajectory) -> RewardResult:
        """Result for the text of the last turn, without special tokens; a failed trajectory gets no score.

        Raises the same errors as `RewardRunner.score`.
        """
        if trajectory.state is TrajectoryState.FAILED:
            return failure("error", f"the rollout failed: {trajectory.stop_reason}: {trajectory.detail}")
        view = self._view(trajectory) if self.runner.reads_trajectory(trajectory.row) else None
        response = self._text(trajectory.response_ids[trajectory.answer_start :])
        return await self.runner.score(response, trajectory.row, view)

    def _text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _view(self, trajectory: Trajectory) -> dict[str, Any]:
        """The trajectory as passed to scorers (docs/rewards.md)."""
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
    """Columns `score` (NaN if there is none), `score_seconds`, `score_wait` [B] float32, and `score_status`,
    `score_detail` and `named` (rewards by name) per row.

    `score_wait` is the time in seconds that the whole batch waited for scores after its last trajectory ended.
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
    """Results from the columns written by `score_columns`."""
    columns = batch.non_tensor_batch
    scores, seconds = batch.batch["score"].tolist(), batch.batch["score_seconds"].tolist()
    rows = zip(scores, columns["score_status"], columns["score_detail"], columns["named"], seconds, strict=True)
    return [RewardResult(None if isnan(score) else score, *others) for score, *others in rows]
