"""Metrics of a step: statistics of its batch, and the time of its phases.

The other names of docs/metrics.md are added where their values arise: `actor/` and `critic/` in training/losses.py and
training/engine.py, `correction/` and the KL terms in trainer/advantage.py, `sampling/` and `rollout/` in
trainer/sampler.py, `kl/canary` by the push in trainer/trainer.py.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rl_core.algorithms.advantages import Groups, group_index
from rl_core.algorithms.correction import mismatch_metrics
from rl_core.algorithms.masked import masked_mean
from rl_core.data.protocol import DataProto, Metrics


class Phases:
    """Wall time in seconds of the phases of one step, and the tokens processed by some of them.

    The trainer's phases are `rollout`, `score`, `log_prob`, `advantage`, `update`, `push`, `commit`, `record` and,
    in profiled steps, `profile`; `rollout` and `update` count tokens. The step begins with this object.
    """

    def __init__(self, on_begin: Callable[[str], None] = lambda name: None) -> None:
        """`on_begin` receives the name of each phase as it begins."""
        self.on_begin, self.start = on_begin, time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.tokens: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times the block as phase `name`; a phase inside another one is not part of the outer one."""
        self.on_begin(name)
        start, inside = time.perf_counter(), sum(self.seconds.values())
        yield
        others = sum(self.seconds.values()) - inside
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start - others

    def count(self, name: str, tokens: float) -> None:
        """Adds to the token count of phase `name`."""
        self.tokens[name] = self.tokens.get(name, 0.0) + tokens

    def metrics(self, tokens: float) -> Metrics:
        """`time/<phase>`, `time/step`, and tokens per second of the step and of the phases that count tokens."""
        total = time.perf_counter() - self.start
        return {
            **{f"time/{name}": seconds for name, seconds in self.seconds.items()},
            "time/step": total,
            "perf/tokens_per_s": tokens / max(total, 1e-9),
            **{f"perf/{name}_tokens_per_s": n / max(self.seconds[name], 1e-9) for name, n in self.tokens.items()},
        }


def spread(name: str, values: Tensor) -> Metrics:
    """Mean, maximum and minimum of a vector; empty for an empty vector."""
    if not len(values):
        return {}
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def batch_metrics(batch: DataProto, multi_turn: bool) -> Metrics:
    """Scores, rewards, lengths, groups, advantages and turns."""
    tensors, mask_BR, scored_B = batch.batch, batch.batch["response_mask"], batch.batch["scored"]
    score_B = tensors["token_level_scores"].sum(-1)
    group_B = group_index(list(batch.non_tensor_batch["uid"]))
    groups = Groups(score_B, group_B)
    stop = batch.non_tensor_batch["stop_reason"]
    metrics = {
        **spread("score", score_B[scored_B]),
        **spread("reward", tensors["token_level_rewards"].sum(-1)[scored_B]),
        "reward/failed_share": 1.0 - scored_B.float().mean().item(),
        "reward/unreadable_share": float((batch.non_tensor_batch["score_status"] == "unreadable").mean()),
        "reward/seconds_mean": tensors["score_seconds"].mean().item(),
        "reward/seconds_max": tensors["score_seconds"].max().item(),
        "reward/wait": tensors["score_wait"].max().item(),
        "group/equal_share": (groups.flat_B / groups.count_B).sum().item() / groups.number,
        "group/alone_share": ((groups.count_B < 2) / groups.count_B).sum().item() / groups.number,
        "group/std_mean": (groups.std_B / groups.count_B).sum().item() / groups.number,
        **spread("response_length", tensors["response_length"].float()),
        **spread("prompt_length", tensors["prompt_length"].float()),
        "response_length/truncated_share": float((stop == "length").mean()),
        **spread("advantage", tensors["advantages"][mask_BR > 0]),
    }
    if multi_turn:
        metrics |= conversation_metrics(batch)
    for name, column in tensors.items():
        if name.startswith("reward_named/"):
            metrics |= spread(name, column[scored_B])
    if "values" in tensors:
        metrics |= value_metrics(tensors["values"], tensors["returns"], mask_BR)
    return metrics


def mismatch(batch: DataProto) -> Metrics:
    """Mismatch between rollout engine and trainer; empty without the engine's log-probs."""
    tensors = batch.batch
    if "rollout_log_probs" not in tensors:
        return {}
    found = mismatch_metrics(tensors["old_log_probs"], tensors["rollout_log_probs"], tensors["response_mask"])
    return {f"kl/{name}": value for name, value in found.items()}


def conversation_metrics(batch: DataProto) -> Metrics:
    """Turns, calls of tools and environment with their rewards, and the share of failed trajectories."""
    calls = [call for row in batch.non_tensor_batch["calls"] for call in row]
    return {
        **spread("turns", batch.batch["turns"].float()),
        **spread("turn_reward", batch.batch["turn_reward"]),
        "tools/calls_mean": len(calls) / len(batch),
        "tools/failed_share": sum(call["status"] != "ok" for call in calls) / max(len(calls), 1),
        "tools/seconds_mean": sum(call["seconds"] for call in calls) / max(len(calls), 1),
        "rollout/failed_share": float((batch.non_tensor_batch["status"] == "failed").mean()),
    }


def value_metrics(values_BR: Tensor, returns_BR: Tensor, mask_BR: Tensor) -> Metrics:
    """Mean return, and the share of the returns' variance explained by the critic."""
    trained_BR = mask_BR > 0
    values, returns = values_BR[trained_BR], returns_BR[trained_BR]
    variance = returns.var(unbiased=False) if len(returns) else torch.tensor(0.0)
    explained = 1.0 - ((returns - values).var(unbiased=False) / variance) if variance > 1e-8 else torch.tensor(0.0)
    return {
        "critic/explained_variance": float(explained),
        "critic/return_mean": masked_mean(returns_BR, mask_BR).item(),
    }
