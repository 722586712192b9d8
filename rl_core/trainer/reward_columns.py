"""Converts the results of scorers to the reward columns of a batch."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rl_core.algorithms.advantages import ESTIMATORS
from rl_core.algorithms.shaping import overlong_penalty
from rl_core.config.schema import RunConfig
from rl_core.data.protocol import DataProto
from rl_core.data.rows import Row
from rl_core.errors import InputError, TransientError
from rl_core.rewards.worker import MISTAKES, RewardResult
from rl_core.rollout.scoring import results_of

NAMED = "reward_named/"
"""Prefix of the columns [B] with the named rewards of a scorer."""


def answer_texts(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Text of the policy's last turn of each response, without special tokens.

    Reads `responses` [B, R], `answer_start` and `response_length` [B].
    """
    spans = zip(batch.batch["answer_start"].tolist(), batch.batch["response_length"].tolist(), strict=True)
    ids = [row[start:end].tolist() for row, (start, end) in zip(batch.batch["responses"], spans, strict=True)]
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


class ModelScores(Protocol):
    """Interface of the reward model's contribution to scores."""

    def added(self, results: list[RewardResult], rows: list[Row], responses: list[str]) -> list[RewardResult]:
        """Returns the results with the model's scores added; row i belongs to response i."""


def collect_results(
    batch: DataProto, model: ModelScores | None, tokenizer: PreTrainedTokenizerBase
) -> list[RewardResult]:
    """One result per row: the scorers' result from the rollout plus the reward model's score, computed here.

    Reads `score`, `score_seconds`, `score_status`, `score_detail` and `named` [B] and, with a reward model, `row`,
    `responses`, `answer_start` and `response_length`.
    """
    results = results_of(batch)
    if model is None:
        return results
    return model.added(results, list(batch.non_tensor_batch["row"]), answer_texts(batch, tokenizer))


def assign_scores(
    batch: DataProto, model: ModelScores | None, tokenizer: PreTrainedTokenizerBase, config: RunConfig, step: int
) -> DataProto:
    """Replaces the columns `score` and `named` by `token_level_scores` [B, R] (score on the last token), `scored` [B]
    bool, `score_status` and `score_detail` [B], and one column `reward_named/…` [B] per named reward.

    Also reads `turn_reward` and `response_length` [B]. An unscored response is not trained: its `response_mask` [B, R]
    becomes 0 and its `uid` unique, so that it leaves its group. Raises TransientError if more than
    `reward.max_failed_share` of the responses are unscored, InputError if mistakes of a scorer alone are so many, or as
    `align_named_rewards`.
    """
    results = collect_results(batch, model, tokenizer)
    if config.reward.shuffle_control:
        results = _of_other_prompts(results, config, step)
    scored_B = torch.tensor([result.score is not None for result in results])
    check_failed(results, config.reward.max_failed_share, f"step {step}")
    tensors = batch.batch
    score_B = torch.tensor([result.score or 0.0 for result in results])
    score_B = score_B + config.reward.turn_weight * tensors["turn_reward"] * scored_B
    scores_BR = torch.zeros_like(tensors["response_mask"])
    last_B = (tensors["response_length"] - 1).clamp(min=0)
    scores_BR[torch.arange(len(batch)), last_B] = score_B
    uid = batch.non_tensor_batch["uid"].copy()
    for i in (~scored_B).nonzero().flatten().tolist():
        uid[i] = f"{uid[i]}-failed-{i}"
    mask_BR = tensors["response_mask"] * scored_B[:, None]
    scored = {"token_level_scores": scores_BR, "scored": scored_B, "response_mask": mask_BR}
    others = {
        "score_status": np.array([result.status for result in results], object),
        "score_detail": np.array([result.detail for result in results], object),
    }
    made = DataProto(
        {**tensors, **scored, **_named_rewards(results, config)},
        {**batch.non_tensor_batch, "uid": uid, **others},
    )
    made.pop(["score", "named"])
    return made


def check_failed(results: Sequence[RewardResult], limit: float, where: str) -> None:
    """Raises an error if more than a share of `limit` of the responses could not be scored: InputError if mistakes of
    a scorer alone are so many, since a retry would repeat them, else TransientError."""
    failed = [result for result in results if result.score is None]
    mistakes = [result for result in failed if result.status in MISTAKES]
    most, setting = limit * len(results), f"reward.max_failed_share={limit}" if limit else "none may fail"
    if len(mistakes) > most:
        raise InputError(
            f"scores by a scorer without mistakes (limit: {setting})",
            f"{len(mistakes)} of {len(results)} responses without a score; "
            f"the first: {mistakes[0].status}: {mistakes[0].detail}",
            where,
            "correct the scorer or reward model; for an answer that it cannot read, a scorer returns 0",
        )
    if len(failed) > most:
        raise TransientError(
            f"{where}: {len(failed)} of {len(results)} responses could not be scored "
            f"(limit: {setting}); the first: {failed[0].status}: {failed[0].detail}"
        )


def _named_rewards(results: list[RewardResult], config: RunConfig) -> dict[str, torch.Tensor]:
    """One column [B] per named reward; 0 where it is missing.

    Raises InputError if the estimator uses named rewards and one is missing, since it would be trained as 0.
    """
    scored = [result.named for result in results if result.score is not None]
    names = sorted({name for each in scored for name in each})
    _check_learned(names, [set(each) for each in scored], config)
    return {f"{NAMED}{name}": torch.tensor([result.named.get(name, 0.0) for result in results]) for name in names}


def _check_learned(names: Sequence[str], seen: Sequence[set[str]], config: RunConfig) -> None:
    different = [each for each in seen if each != set(names)]
    if different and "named_rewards" in ESTIMATORS.resolve(config.algorithm.estimator).needs:
        raise InputError(
            f"the named rewards {', '.join(names)} for every response",
            f"{', '.join(sorted(different[0])) or 'none'} for one response",
            f"the scorer (reward.function, or the one of the rows' data_source) with {config.algorithm.estimator}",
            "return all names for every response, with 0.0 for those that do not apply",
        )


def align_named_rewards(parts: list[DataProto], config: RunConfig) -> list[DataProto]:
    """Adds the columns `reward_named/…` [B] that any of the batches has to all of them; 0 where one is missing.

    Raises InputError if the estimator uses named rewards and one is missing.
    """
    found = [{name.removeprefix(NAMED) for name in part.batch if name.startswith(NAMED)} for part in parts]
    names = sorted(set().union(*found))
    scored = [each for part, each in zip(parts, found, strict=True) if part.batch["scored"].any()]
    _check_learned(names, scored, config)
    return [
        DataProto(
            {**{f"{NAMED}{name}": torch.zeros(len(part)) for name in names}, **part.batch},
            part.non_tensor_batch,
        )
        for part in parts
    ]


def _of_other_prompts(results: list[RewardResult], config: RunConfig, step: int) -> list[RewardResult]:
    """Assigns each prompt's results to another prompt's responses."""
    n = len(results) // config.data.train_batch_size  # 1 for the greedy responses, which use the same permutation
    ring = np.random.default_rng([config.trainer.seed, step]).permutation(config.data.train_batch_size)
    # A cycle moves the results of every prompt; a random permutation can have fixed points.
    giver = dict(zip(ring.tolist(), np.roll(ring, 1).tolist(), strict=True))
    return [results[giver[prompt] * n + i] for prompt in range(len(giver)) for i in range(n)]


def apply_overlong_penalty(batch: DataProto, config: RunConfig) -> DataProto:
    """Adds `token_level_shaped` [B, R]: `token_level_scores` plus the (negative) penalty of overlong responses.

    Also reads `response_length` and `scored` [B].
    """
    algorithm, length_B = config.algorithm, batch.batch["response_length"]
    shaped_BR = batch.batch["token_level_scores"].clone()
    if algorithm.overlong_buffer:
        penalty_B = overlong_penalty(
            length_B.float(), config.data.max_response_length, algorithm.overlong_buffer, algorithm.overlong_penalty
        )
        shaped_BR[torch.arange(len(batch)), (length_B - 1).clamp(min=0)] += penalty_B * batch.batch["scored"]
    return batch.union(DataProto({"token_level_shaped": shaped_BR}))
