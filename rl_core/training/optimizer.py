"""AdamW and its learning-rate schedule."""

import math

import torch
from torch import nn

from rl_core.config.schema import OptimConfig


def build_optimizer(module: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW over all trainable parameters; the engine sets the rate from `learning_rate` before every update."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, config.lr, config.betas, weight_decay=config.weight_decay, fused=True)


def learning_rate(config: OptimConfig, update: int, total: int) -> float:
    """Learning rate of optimizer step `update` (from 0) of `total`: linear warm-up, then `lr_schedule`."""
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    progress = min(1.0, (update - config.warmup_steps) / max(1, total - config.warmup_steps))
    factor = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return config.lr * factor[config.lr_schedule]
