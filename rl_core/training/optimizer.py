"""AdamW and its learning-rate schedule."""

import math

import torch
from torch import nn

from rl_core.config.schema import OptimConfig


def build_optimizer(module: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW in one kernel over all parameters that train; `learning_rate` gives the rate before every update."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, config.lr, config.betas, weight_decay=config.weight_decay, fused=True)


def learning_rate(config: OptimConfig, update: int, total: int) -> float:
    """Learning rate of optimizer step `update` (from 0) of `total`: linear warm-up, then the schedule's shape."""
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    done = min(1.0, (update - config.warmup_steps) / max(1, total - config.warmup_steps))
    shape = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    return config.lr * shape[config.lr_schedule]
