"""Rows of a step on the driver: prompts with seeds, the order over ranks, and the rows used by the update."""

import numpy as np
import torch

from rl_core.algorithms.advantages import ESTIMATORS
from rl_core.algorithms.policy_losses import POLICY_LOSSES
from rl_core.algorithms.shaping import pf_ppo_weights, resample
from rl_core.config.schema import RunConfig
from rl_core.data.balance import balanced_parts
from rl_core.data.dataset import RLHFDataset
from rl_core.data.protocol import DataProto
from rl_core.training.losses import LOG_PROB_COLUMNS

PF_PPO_STREAM = 1_000_000
"""Random stream of policy filtering; above every attempt number of dynamic sampling."""


def log_probs_with_update(config: RunConfig) -> bool:
    """Whether the log-probs before the update come from the forward pass of the update, which equals a pass of its own.

    True for a single update on the rows in their order, if nothing before it reads them.
    """
    reading = {f"{name}_BR" for name in LOG_PROB_COLUMNS} & {*ESTIMATORS.resolve(config.algorithm.estimator).needs}
    reading |= {*POLICY_LOSSES.resolve(config.actor.policy_loss).needs}
    return (
        config.actor.ppo_epochs == 1
        and config.mini_batch_size == config.data.train_batch_size
        and config.algorithm.pf_ppo == "none"
        and config.correction.weights == config.correction.reject == "none"
        and not config.needs_reference
        and not reading
    )


def prompt_batch(rows: RLHFDataset, indices: list[int], config: RunConfig, step: int, attempt: int = 0) -> DataProto:
    """Each row's prompt `rollout.n` times: columns `prompt_ids`, `row`, `uid` (per prompt) and `seed` (per response).

    Seeds depend only on run seed, step, attempt (of dynamic sampling) and position, so a repeated step samples the same
    responses.
    """
    chosen = [rows[i] for i in indices]
    batch = DataProto.from_dict(
        {},
        {
            "prompt_ids": [row["prompt_ids"] for row in chosen],
            "row": [{key: value for key, value in row.items() if key != "prompt_ids"} for row in chosen],
            "uid": [f"{step}-{attempt}-{i}" for i in range(len(chosen))],
        },
    ).repeat(config.rollout.n)
    return batch.union(
        DataProto.from_dict({}, {"seed": response_seeds([config.trainer.seed, step, attempt], len(batch))})
    )


def response_seeds(origin: list[int], count: int) -> list[int]:
    """One sampling seed per response, derived from the numbers that identify the batch."""
    seeds: list[int] = np.random.SeedSequence(origin).generate_state(count).tolist()
    return seeds


def balanced_order(batch: DataProto, config: RunConfig) -> list[int]:
    """Row order in which each rank's share contains its part of every mini-batch, with about equal token counts."""
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


def policy_filter(batch: DataProto, config: RunConfig, step: int) -> DataProto:
    """Resamples the rows by score for policy-filtered PPO (`algorithm.pf_ppo`); returns the batch unchanged if off.

    Reads `token_level_scores`, `response_mask` or `sampled_mask` [B, R], and `scored` [B].
    """
    algorithm = config.algorithm
    if algorithm.pf_ppo == "none":
        return batch
    score_B, scored_B = batch.batch["token_level_scores"].sum(-1), batch.batch["scored"]
    # Also exclude responses whose prompt has no greedy baseline; tokens rejected by the correction still count.
    scored_B = scored_B & (batch.batch.get("sampled_mask", batch.batch["response_mask"]) > 0).any(-1)
    if not scored_B.any():
        return batch
    weight_B = torch.zeros_like(score_B)  # unscored responses are never drawn
    weight_B[scored_B] = pf_ppo_weights(score_B[scored_B], algorithm.pf_ppo, algorithm.pf_ppo_power)
    seed = response_seeds([config.trainer.seed, step, PF_PPO_STREAM], 1)[0]
    return batch[resample(weight_B, torch.Generator().manual_seed(seed))]


def training_rows(batch: DataProto, config: RunConfig, step: int) -> DataProto:
    """The step's rows as the workers train on them: policy-filtered, and ordered by data-parallel group."""
    batch = policy_filter(batch, config, step)
    return batch.reorder(balanced_order(batch, config))
