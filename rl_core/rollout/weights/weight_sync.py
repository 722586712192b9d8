"""Pushes weights from the sharded training engine to the colocated rollout engine, and verifies them with a canary.

A pool's engines get them through cluster/rollout_pool.py.
"""

import tempfile
from pathlib import Path

import torch

from rl_core.models.lora import save_adapters
from rl_core.rollout.engine.protocol import RolloutEngine
from rl_core.rollout.engine.shared_memory import ADAPTER_PREFIX, SHARED_MEMORY
from rl_core.rollout.weights.canary import canary_of
from rl_core.training.engine import DTYPES, TrainEngine


class ShardingManager:
    """Pushes FSDP2 shards as whole tensors, one at a time, to the rollout engine, with a version and a canary."""

    def __init__(
        self,
        actor: TrainEngine,
        rollout: RolloutEngine,
        dtype: str,
        tolerance: float,
        max_length: int,
        as_adapter: bool = False,
    ) -> None:
        """`max_length` is the longest sequence in tokens supported by both sides; `as_adapter` pushes the actor's base
        weights once and afterwards only its adapters."""
        self.actor, self.rollout = actor, rollout
        self._as_adapter, self._base_pushed = as_adapter, False
        self.dtype, self.tolerance, self.max_length = DTYPES[dtype], tolerance, max_length

    def push(self, version: int) -> float:
        """Pushes all weights, or the adapters, and returns the canary's maximum log-prob difference; raises
        TrainingError if it exceeds the tolerance."""
        # Compute the canary first: on CUDA, its activations are freed before the engine allocates memory.
        canary = canary_of(self.actor, self.max_length)
        if not self._base_pushed:
            whole = self.actor.full_parameters(merged=not self._as_adapter)
            self.rollout.update_weights(self.actor.in_dtype(whole, self.dtype), version)
        if self._as_adapter:
            self._base_pushed = True
            self._push_adapter(version)
        self.actor.offload()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.rollout.wake_up()
        engine_log_probs = self.rollout.log_probs(canary.token_ids)
        return 0.0 if self.rollout.is_follower else canary.difference(engine_log_probs, version, self.tolerance)

    def _push_adapter(self, version: int) -> None:
        weights = {name: tensor.cpu() for name, tensor in self.actor.adapter_parameters()}
        # Use shared memory if available.
        memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        with tempfile.TemporaryDirectory(prefix=ADAPTER_PREFIX, dir=memory) as directory:
            folder = Path(directory) / "adapter"
            save_adapters(self.actor.model, weights, self.actor.source, folder)
            self.rollout.update_adapter(folder, version)
