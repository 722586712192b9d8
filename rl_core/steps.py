"""The driver's part of a step: prompts to a batch, responses to rewards, rows to a balanced order, and a record."""

import io
import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import PreTrainedTokenizerBase

from rl_core.algorithms.advantages import ESTIMATORS, group_index
from rl_core.algorithms.correction import importance_weights, rejection_mask
from rl_core.algorithms.kl import KLController, kl_estimate
from rl_core.algorithms.masked import masked_mean
from rl_core.algorithms.shaping import overlong_penalty, pf_ppo_weights, resample
from rl_core.config.schema import CorrectionConfig, RunConfig
from rl_core.data.balance import balanced_parts
from rl_core.data.dataset import RLHFDataset
from rl_core.data.protocol import DataProto
from rl_core.data.rows import Row
from rl_core.errors import InputError, TransientError
from rl_core.metrics import Metrics
from rl_core.rewards.worker import RewardResult
from rl_core.rollout.scoring import results_of

# Stream of random numbers that no attempt of dynamic sampling uses.
PF_PPO_STREAM = 1_000_000
# Prefix of the columns [B] that hold the named rewards of a scorer.
NAMED = "reward_named/"


def prompt_batch(rows: RLHFDataset, indices: list[int], config: RunConfig, step: int, attempt: int = 0) -> DataProto:
    """The rows' prompts, each `rollout.n` times, with a `uid` per prompt and a sampling `seed` per response.

    Seeds depend on run seed, step, attempt (of dynamic sampling) and place only, so a repeated step draws the same
    responses.
    """
    chosen = [rows[i] for i in indices]
    batch = DataProto.from_dict(
        {},
        {
            "prompt_ids": [row["prompt_ids"] for row in chosen],
            "row": [{key: value for key, value in row.items() if key != "prompt_ids"} for row in chosen],
            "uid": [f"{step}-{attempt}-{place}" for place in range(len(chosen))],
        },
    ).repeat(config.rollout.n)
    return batch.union(
        DataProto.from_dict({}, {"seed": response_seeds([config.trainer.seed, step, attempt], len(batch))})
    )


def response_seeds(origin: list[int], count: int) -> list[int]:
    """One sampling seed a response, from the numbers that name its batch."""
    return np.random.SeedSequence(origin).generate_state(count).tolist()


def answer_texts(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The policy's last turn of each response as text, without special tokens."""
    spans = zip(batch.batch["answer_start"].tolist(), batch.batch["response_length"].tolist(), strict=True)
    ids = [row[start:end].tolist() for row, (start, end) in zip(batch.batch["responses"], spans, strict=True)]
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


class ModelScores(Protocol):
    """The reward model's part in the scores of responses."""

    def added(self, results: list[RewardResult], rows: list[Row], responses: list[str]) -> list[RewardResult]:
        """The results with the model's scores; row i belongs to response i."""


def scores(batch: DataProto, model: ModelScores | None, tokenizer: PreTrainedTokenizerBase) -> list[RewardResult]:
    """A result per row: what its scorers gave as it was rolled out, with what the reward model gives now."""
    results = results_of(batch)
    if model is None:
        return results
    return model.added(results, list(batch.non_tensor_batch["row"]), answer_texts(batch, tokenizer))


def score(
    batch: DataProto, model: ModelScores | None, tokenizer: PreTrainedTokenizerBase, config: RunConfig, step: int
) -> DataProto:
    """Makes of `score` and `named`: `token_level_scores` [B, R], the score on each response's last token, `scored` [B],
    who has one, and a column [B] for each named reward.

    A response without a score trains nothing: its mask is 0 and it leaves its group. Raises TransientError when more
    than `reward.max_failed_share` of them have none.
    """
    results = scores(batch, model, tokenizer)
    if config.reward.shuffle_control:
        results = _of_other_prompts(results, config, step)
    scored_B = torch.tensor([result.score is not None for result in results])
    failed = [result for result in results if result.score is None]
    if len(failed) > config.reward.max_failed_share * len(results):
        raise TransientError(
            f"step {step}: {len(failed)} of {len(results)} responses could not be scored, more than "
            f"reward.max_failed_share={config.reward.max_failed_share}; "
            f"the first: {failed[0].status}: {failed[0].detail}"
        )
    tensors = batch.batch
    score_B = torch.tensor([result.score or 0.0 for result in results])
    score_B = score_B + config.reward.turn_weight * tensors["turn_reward"] * scored_B
    scores_BR = torch.zeros_like(tensors["response_mask"])
    last_B = (tensors["response_length"] - 1).clamp(min=0)
    scores_BR[torch.arange(len(batch)), last_B] = score_B
    uid = batch.non_tensor_batch["uid"].copy()
    for place in (~scored_B).nonzero().flatten().tolist():
        uid[place] = f"{uid[place]}-failed-{place}"
    mask_BR = tensors["response_mask"] * scored_B[:, None]
    scored = {"token_level_scores": scores_BR, "scored": scored_B, "response_mask": mask_BR}
    others = {
        "score_status": np.array([result.status for result in results], object),
        "score_detail": np.array([result.detail for result in results], object),
    }
    made = DataProto(
        {**tensors, **scored, **_named_rewards(results, config)},
        {**batch.non_tensor_batch, "uid": uid, **others},
        batch.meta_info,
    )
    made.pop(["score", "named"])
    return made


def _named_rewards(results: list[RewardResult], config: RunConfig) -> dict[str, torch.Tensor]:
    """A column [B] for each reward that a scorer named; 0 where it is missing.

    Raises InputError where the estimator learns from them and one is missing, which would train as a 0.
    """
    scored = [result.named for result in results if result.score is not None]
    names = sorted({name for each in scored for name in each})
    _check_learned(names, [set(each) for each in scored], config)
    return {f"{NAMED}{name}": torch.tensor([result.named.get(name, 0.0) for result in results]) for name in names}


def _check_learned(names: Sequence[str], seen: Sequence[set[str]], config: RunConfig) -> None:
    different = [each for each in seen if each != set(names)]
    if different and "named_rewards" in ESTIMATORS.resolve(config.algorithm.estimator).needs:
        raise InputError(
            f"the rewards {', '.join(names)} for every response",
            f"{', '.join(sorted(different[0])) or 'none'} for one of them",
            f"the scorer (reward.function, or that of the rows' data_source) with {config.algorithm.estimator}",
            "return all names for every response, 0.0 for what does not apply",
        )


def with_the_same_rewards(parts: list[DataProto], config: RunConfig) -> list[DataProto]:
    """The batches with all columns of named rewards that any of them has; 0 where one is missing.

    Raises InputError where the estimator learns from them and one is missing.
    """
    found = [{name.removeprefix(NAMED) for name in part.batch if name.startswith(NAMED)} for part in parts]
    names = sorted(set().union(*found))
    scored = [each for part, each in zip(parts, found, strict=True) if part.batch["scored"].any()]
    _check_learned(names, scored, config)
    return [
        DataProto(
            {**{f"{NAMED}{name}": torch.zeros(len(part)) for name in names}, **part.batch},
            part.non_tensor_batch,
            part.meta_info,
        )
        for part in parts
    ]


def _of_other_prompts(results: list[RewardResult], config: RunConfig, step: int) -> list[RewardResult]:
    """Each prompt's results handed to another prompt's responses."""
    n = len(results) // config.data.train_batch_size  # 1 for the greedy responses, which go along the same ring
    ring = np.random.default_rng([config.trainer.seed, step]).permutation(config.data.train_batch_size)
    # Along a ring every prompt gets another one's; a mere permutation leaves some of them their own.
    giver = dict(zip(ring.tolist(), np.roll(ring, 1).tolist(), strict=True))
    return [results[giver[prompt] * n + place] for prompt in range(len(giver)) for place in range(n)]


def shaped(batch: DataProto, config: RunConfig) -> DataProto:
    """Adds `token_level_shaped` [B, R]: the scores less the penalty of overlong responses."""
    algorithm, length_B = config.algorithm, batch.batch["response_length"]
    shaped_BR = batch.batch["token_level_scores"].clone()
    if algorithm.overlong_buffer:
        penalty_B = overlong_penalty(
            length_B.float(), config.data.max_response_length, algorithm.overlong_buffer, algorithm.overlong_penalty
        )
        shaped_BR[torch.arange(len(batch)), (length_B - 1).clamp(min=0)] += penalty_B * batch.batch["scored"]
    return batch.union(DataProto({"token_level_shaped": shaped_BR}, {}, {}))


def balanced_order(batch: DataProto, config: RunConfig) -> list[int]:
    """Row order in which every rank's share holds its part of each mini-batch, of about equal token sums."""
    length_B = (batch.batch["prompt_length"] + batch.batch["response_length"]).tolist()
    world, per_mini = config.data_parallel_size, config.mini_batch_size * config.rollout.n
    if world == 1:
        return list(range(len(batch)))
    shares: list[list[int]] = [[] for _ in range(world)]
    for start in range(0, len(batch), per_mini):
        parts = balanced_parts(length_B[start : start + per_mini], world, equal_counts=True)
        for share, part in zip(shares, parts, strict=True):
            share += [start + row for row in part]
    return [row for share in shares for row in share]


def apply_kl(batch: DataProto, kind: str, coef: float) -> tuple[DataProto, Metrics]:
    """Adds `token_level_rewards`: the shaped scores less `coef` times the per-token KL against the reference."""
    rewards_BR, metrics = batch.batch["token_level_shaped"], {}
    if "ref_log_prob" in batch.batch:
        mask_BR, old_BR, ref_BR = (batch.batch[n] for n in ("response_mask", "old_log_probs", "ref_log_prob"))
        metrics["kl/ref"] = masked_mean(kl_estimate(old_BR, ref_BR, "k3"), mask_BR).item()
        metrics["kl/ref_k1"] = masked_mean(kl_estimate(old_BR, ref_BR, "k1"), mask_BR).item()
        rewards_BR = rewards_BR - coef * kl_estimate(old_BR, ref_BR, kind) * mask_BR
    return batch.union(DataProto({"token_level_rewards": rewards_BR}, {}, {})), metrics


def shape(batch: DataProto, config: RunConfig, controller: KLController) -> tuple[DataProto, Metrics]:
    """Rollout correction, then the rewards that advantages come from; what both did, as metrics."""
    batch, metrics = correct(batch, config.correction)
    batch, kl_metrics = apply_kl(batch, config.algorithm.kl_in_reward_type, controller.coef)
    if config.algorithm.kl_in_reward_coef:
        kl_metrics["kl/coef"] = controller.coef
    return batch, metrics | kl_metrics


def correct(batch: DataProto, config: CorrectionConfig) -> tuple[DataProto, Metrics]:
    """Adds the rollout correction's `weights` [B, R] and takes rejected tokens out of `response_mask`.

    The mask before any rejection stays as `sampled_mask`.
    """
    if config.reject == config.weights == "none":
        return batch, {}  # the engine may not have been asked for its log-probs
    tensors, metrics = dict(batch.batch), {}
    old_BR, rollout_BR, mask_BR = (tensors[n] for n in ("old_log_probs", "rollout_log_probs", "response_mask"))
    if config.reject != "none":
        kept_BR = rejection_mask(old_BR, rollout_BR, mask_BR, config.reject, config.reject_bounds)
        metrics["correction/rejected_share"] = 1.0 - (kept_BR.sum() / mask_BR.sum().clamp(min=1)).item()
        tensors["sampled_mask"] = mask_BR
        tensors["response_mask"] = mask_BR = kept_BR
    if config.weights != "none":
        bounded_BR, weights_BR = (
            importance_weights(old_BR, rollout_BR, mask_BR, config.weights, config.weight_bounds, normalise)
            for normalise in (False, config.normalise)
        )
        tensors["weights"] = weights_BR
        metrics["correction/weight_mean"] = masked_mean(weights_BR, mask_BR).item()
        at_bound_BR = (bounded_BR >= config.weight_bounds[1]) | (bounded_BR == 0)
        metrics["correction/bounded_share"] = masked_mean(at_bound_BR.float(), mask_BR).item()
    return DataProto(tensors, batch.non_tensor_batch, batch.meta_info), metrics


def advantages(batch: DataProto, config: RunConfig) -> DataProto:
    """Adds `advantages` and `returns` [B, R] by the configured estimator."""
    tensors, algorithm = batch.batch, config.algorithm
    entry = ESTIMATORS.resolve(algorithm.estimator)
    weights = dict(pair.split("=") for pair in algorithm.reward_weights)
    named = {name.removeprefix(NAMED): column for name, column in tensors.items() if name.startswith(NAMED)}
    pool = {
        "values_BR": tensors.get("values"),
        "old_log_probs_BR": tensors["old_log_probs"],
        "sum_pi_squared_BR": tensors["sum_pi_squared"],
        "greedy_reward_B": tensors.get("greedy_reward_B"),
        "named_rewards": named or None,
        "reward_weights": {name: float(weight) for name, weight in weights.items()},
        "gamma": algorithm.gamma,
        "lam": algorithm.lam,
    }
    absent = [name for name in entry.needs if pool.get(name) is None]
    if absent:
        raise InputError(
            f"an estimator that needs no more than what there is: {', '.join(sorted(pool.keys() - absent))}",
            f"one that needs {', '.join(absent)}",
            f"algorithm.estimator={algorithm.estimator}",
            "choose another one; named_rewards come from a scorer that returns a dict, values_BR with gae only",
        )
    group_B = group_index(list(batch.non_tensor_batch["uid"]))
    advantages_BR, returns_BR = entry.function(
        tensors["token_level_rewards"], tensors["response_mask"], group_B, **{name: pool[name] for name in entry.needs}
    )
    return batch.union(DataProto({"advantages": advantages_BR, "returns": returns_BR}, {}, {}))


def policy_filter(batch: DataProto, config: RunConfig, step: int) -> DataProto:
    """The rows drawn again as policy-filtered PPO asks for; the batch itself where it is off."""
    algorithm = config.algorithm
    if algorithm.pf_ppo == "none":
        return batch
    score_B, scored_B = batch.batch["token_level_scores"].sum(-1), batch.batch["scored"]
    # Nor one whose prompt has no baseline; one that the correction rejected is as good as it was.
    scored_B = scored_B & (batch.batch.get("sampled_mask", batch.batch["response_mask"]) > 0).any(-1)
    if not scored_B.any():
        return batch
    weight_B = torch.zeros_like(score_B)  # a response without a score is not drawn
    weight_B[scored_B] = pf_ppo_weights(score_B[scored_B], algorithm.pf_ppo, algorithm.pf_ppo_power)
    seed = response_seeds([config.trainer.seed, step, PF_PPO_STREAM], 1)[0]
    return batch[resample(weight_B, torch.Generator().manual_seed(seed))]


def training_rows(batch: DataProto, config: RunConfig, step: int) -> DataProto:
    """The step's rows as the workers train on them: after policy filtering, one group's share behind the other's."""
    batch = policy_filter(batch, config, step)
    return batch.reorder(balanced_order(batch, config))


def rollout_parquet(batch: DataProto) -> bytes:
    """The step's trajectories as parquet, without padding: all that advantages and losses came from, and these."""
    prompt_length, length = batch.batch["prompt_length"].tolist(), batch.batch["response_length"].tolist()
    columns: dict[str, Any] = {
        name: batch.non_tensor_batch[name].tolist()
        for name in ("uid", "seed", "stop_reason", "status", "detail", "score_status", "score_detail")
    }
    columns["calls"] = [json.dumps(calls) for calls in batch.non_tensor_batch["calls"]]
    columns["row"] = [row["extra_info"]["index"] for row in batch.non_tensor_batch["row"]]
    columns["data_source"] = [row["data_source"] for row in batch.non_tensor_batch["row"]]
    columns["prompt_ids"] = [row[:n] for row, n in zip(batch.batch["prompts"].tolist(), prompt_length, strict=True)]
    for name, tensor in sorted(batch.batch.items()):
        if tensor.ndim == 1 and name not in ("prompt_length", "response_length"):
            columns[name] = tensor.tolist()
        elif tensor.ndim == 2 and name != "prompts":
            columns[name] = [row[:n] for row, n in zip(tensor.tolist(), length, strict=True)]
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def rollout_table(data: bytes, needed: Sequence[str], where: str) -> pa.Table:
    """What `rollout_parquet` wrote; raises InputError when it is damaged or lacks a column of `needed`."""
    try:
        table = pq.read_table(io.BytesIO(data))
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            "the rollouts of a step as parquet", str(error), where, "take another step; this file is damaged"
        ) from error
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        raise InputError(
            f"the columns {', '.join(needed)}",
            f"no {', '.join(missing)}",
            where,
            "take a step of a run that this version trained",
        )
    return table
