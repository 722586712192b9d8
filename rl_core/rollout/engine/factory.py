"""Builds the rollout engine that the config names."""

from pathlib import Path

import torch

from rl_core.config.schema import RunConfig
from rl_core.rollout.engine.protocol import RolloutEngine


def build_engine(model: Path, config: RunConfig, device: torch.device, adapter_rank: int = 0) -> RolloutEngine:
    """The engine for the checkpoint in a folder; `adapter_rank` is the rank of pushed adapters, 0 without adapters.

    Collective over the ranks of a tensor-parallel engine. An engine is imported only if it is used: vLLM alone costs
    several CPU seconds.
    """
    if config.rollout.engine_on(device.type) == "transformers":
        from rl_core.rollout.engine.transformers_engine import TransformersEngine

        return TransformersEngine(model, config.rollout, config.model.dtype, config.max_length, device, adapter_rank)
    from rl_core.rollout.engine.vllm_engine import VLLMEngine

    return VLLMEngine(model, config.rollout, config.model.dtype, config.max_length, device, adapter_rank)
