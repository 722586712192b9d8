"""The reward model's worker, and its contribution to the scores of responses."""

from dataclasses import replace
from math import isfinite

import torch

from rl_core.cluster.base_worker import Worker
from rl_core.cluster.dispatch import Dispatch, register
from rl_core.cluster.worker_group import RayWorkerGroup
from rl_core.data.protocol import DataProto
from rl_core.data.rows import Row
from rl_core.rewards.model import RewardModel
from rl_core.rewards.worker import RewardResult, failure


class RewardModelWorker(Worker):
    """A full copy of the reward model, which scores this rank's share of the responses."""

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the checkpoint at `reward.model.path`."""
        config = self.config
        assert config.reward.model.path is not None
        self.reward_model = RewardModel(
            config.reward.model.path, getattr(torch, config.model.dtype), config.actor.max_tokens_per_micro_batch
        )
        self.has_own_device = config.reward.model.ranks_per_node is not None

    @register(Dispatch.ROLLOUT_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Returns `rm_score` [B] float32 for the columns `messages` (the prompt) and `response` (text); NaN if the
        conversation exceeds the model's context length."""
        texts = data.non_tensor_batch
        model = self.reward_model
        conversations = [
            model.encode(messages, response)
            for messages, response in zip(texts["messages"], texts["response"], strict=True)
        ]
        model.model.to(self.device)
        scores_B = model.score(conversations)
        if not self.has_own_device and self.device.type == "cuda":
            model.model.to("cpu")  # actor and rollout engine need the device's memory
            torch.cuda.empty_cache()
        return DataProto({"rm_score": scores_B})


class RewardModelScores:
    """Adds the reward model's scores to the results of scorers."""

    def __init__(self, model: RayWorkerGroup, weight: float) -> None:
        self.model, self.weight = model, weight

    def added(self, results: list[RewardResult], rows: list[Row], responses: list[str]) -> list[RewardResult]:
        """Adds `weight` times the model's score to each result, and the score as the named reward `model`.

        A response without a score from the scorers or from the model has none; the model skips those without one from
        the scorers.
        """
        scored = [i for i, result in enumerate(results) if result.score is not None]
        if not scored:
            return results
        texts = {"messages": [rows[i]["prompt"] for i in scored], "response": [responses[i] for i in scored]}
        scores = self.model.compute_rm_score(DataProto.from_dict({}, texts)).batch["rm_score"].tolist()
        added = {i: self._joined(results[i], score) for i, score in zip(scored, scores, strict=True)}
        return [added.get(i, result) for i, result in enumerate(results)]

    def _joined(self, result: RewardResult, score: float) -> RewardResult:
        assert result.score is not None
        if not isfinite(score):
            return failure(
                "non_finite", f"the reward model returned {score} (nan: the conversation exceeds its context length)"
            )
        return replace(result, score=result.score + self.weight * score, named={**result.named, "model": score})
