"""A step's rows on the driver: prompts with their seeds, the order over ranks, and the rows that the update uses."""

import numpy as np
import torch

from rl_core.algorithms.shaping import pf_ppo_weights, resample
from rl_core.config.schema import RunConfig
from rl_core.data.balance import balanced_parts
from rl_core.data.dataset import RLHFDataset
from rl_core.data.protocol import DataProto

# Random stream of policy filtering; no attempt of dynamic sampling uses it.
PF_PPO_STREAM = 1_000_000


def prompt_batch(rows: RLHFDataset, indices: list[int], config: RunConfig, step: int, attempt: int = 0) -> DataProto:
    """The rows' prompts, each `rollout.n` times, with a `uid` per prompt and a sampling `seed` per response.

    Seeds depend on run seed, step, attempt (of dynamic sampling) and position only, so a repeated step draws the same
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
    """One sampling seed a response, from the numbers that name its batch."""
    seeds: list[int] = np.random.SeedSequence(origin).generate_state(count).tolist()
    return seeds


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
