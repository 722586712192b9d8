"""What a step is described by: its batch in numbers, and the time of its phases."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rl_core.algorithms.kl import kl_estimate
from rl_core.algorithms.masked import masked_mean
from rl_core.data.protocol import DataProto

Metrics = dict[str, float]


class Phases:
    """Wall time of the phases of one step, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times the block as phase `name`."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self, tokens: float) -> Metrics:
        """`time/<phase>`, `time/step` and tokens per second of the whole step."""
        total = sum(self.seconds.values())
        return {
            **{f"time/{name}": seconds for name, seconds in self.seconds.items()},
            "time/step": total,
            "perf/tokens_per_s": tokens / max(total, 1e-9),
        }


def spread(name: str, values: Tensor) -> Metrics:
    """Mean, largest and smallest of a vector; nothing for an empty one."""
    if not len(values):
        return {}
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def batch_metrics(batch: DataProto, group_B: Tensor) -> Metrics:
    """Rewards, lengths, groups, advantages and the mismatch between rollout engine and trainer.

    Args:
        group_B: group number of each row.
    """
    tensors, mask_BR, scored_B = batch.batch, batch.batch["response_mask"], batch.batch["scored"]
    reward_B = tensors["token_level_scores"].sum(-1)
    groups = int(group_B.max()) + 1
    high_G = torch.full((groups,), -torch.inf).scatter_reduce(0, group_B, reward_B, "amax")
    low_G = torch.full((groups,), torch.inf).scatter_reduce(0, group_B, reward_B, "amin")
    stop = batch.non_tensor_batch["stop_reason"]
    return {
        **spread("reward", reward_B[scored_B]),
        "reward/failed_share": 1.0 - scored_B.float().mean().item(),
        "reward/equal_groups_share": (high_G - low_G <= 1e-8).float().mean().item(),
        **spread("response_length", tensors["response_length"].float()),
        **spread("prompt_length", tensors["prompt_length"].float()),
        "response_length/truncated_share": float((stop == "length").mean()),
        **spread("advantage", tensors["advantages"][mask_BR > 0]),
        **mismatch(tensors["old_log_probs"], tensors["rollout_log_probs"], mask_BR),
    }


def mismatch(old_BR: Tensor, rollout_BR: Tensor, mask_BR: Tensor) -> Metrics:
    """How far the trainer's log-probs are from the rollout engine's: KL k1 and k3, and the largest difference."""
    difference_BR = (old_BR - rollout_BR).abs() * mask_BR
    return {
        "kl/rollout_k1": masked_mean(kl_estimate(rollout_BR, old_BR, "k1"), mask_BR).item(),
        "kl/rollout_k3": masked_mean(kl_estimate(rollout_BR, old_BR, "k3"), mask_BR).item(),
        "kl/rollout_max_difference": difference_BR.max().item() if difference_BR.numel() else 0.0,
    }


def value_metrics(values_BR: Tensor, returns_BR: Tensor, mask_BR: Tensor) -> Metrics:
    """Mean value and the share of the returns' variance that the critic explains."""
    on = mask_BR > 0
    values, returns = values_BR[on], returns_BR[on]
    variance = returns.var(unbiased=False) if len(returns) else torch.tensor(0.0)
    explained = 1.0 - ((returns - values).var(unbiased=False) / variance) if variance > 1e-8 else torch.tensor(0.0)
    return {
        "critic/explained_variance": float(explained),
        "critic/return_mean": masked_mean(returns_BR, mask_BR).item(),
    }
