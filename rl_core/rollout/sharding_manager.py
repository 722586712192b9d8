"""Moves weights from the sharded training engine into the live rollout engine, and proves that they arrived."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from rl_core.data.protocol import DataProto
from rl_core.errors import TrainingError
from rl_core.models.lora import save_adapters
from rl_core.rollout.engine import RolloutEngine
from rl_core.rollout.trajectory import Trajectory, to_batch
from rl_core.training.engine import DTYPES, TrainEngine

CANARY_TOKENS = 16
SHARED_MEMORY = Path("/dev/shm")


class ShardingManager:
    """FSDP2 shards → whole tensors, one at a time → rollout engine, with a version and a canary."""

    def __init__(
        self,
        actor: TrainEngine,
        rollout: RolloutEngine,
        dtype: str,
        tolerance: float,
        max_length: int,
        as_adapter: bool = False,
    ) -> None:
        """`max_length` is the longest sequence that both sides take, in tokens; `as_adapter` pushes the actor's base
        once and from then on its adapters only."""
        self.actor, self.rollout = actor, rollout
        self._as_adapter, self._base_is_there = as_adapter, False
        self.dtype, self.tolerance = DTYPES[dtype], tolerance
        generator = torch.Generator().manual_seed(0)
        # The rollout engine samples one more token behind the canary.
        tokens = min(CANARY_TOKENS, max_length - 1)
        vocab_size = actor.model.config.get_text_config().vocab_size
        self._canary_ids = torch.randint(0, vocab_size, (tokens,), generator=generator).tolist()

    def push(self, version: int) -> float:
        """Pushes all weights, or the adapters, and returns the canary's largest difference of log-probs.

        Raises TrainingError when trainer and engine disagree about fixed tokens: the rollouts would come from another
        policy than the one that is trained.
        """
        # The canary's forward comes first: on CUDA its activations are gone before the engine takes its memory.
        expected = self._trainer_log_probs()
        if not self._base_is_there:
            whole = self.actor.full_parameters(merged=not self._as_adapter)
            self.rollout.update_weights(((name, tensor.to(self.dtype)) for name, tensor in whole), version)
        if self._as_adapter:
            self._base_is_there = True
            self._push_adapter(version)
        self.actor.park()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.rollout.wake_up()
        seen = torch.tensor(self.rollout.log_probs(self._canary_ids))
        difference = (seen - expected).abs().max().item()
        if not difference <= self.tolerance:
            raise TrainingError(
                f"after the push of weights version {version} the rollout engine's log-probs of fixed tokens differ "
                f"from the trainer's by {difference:.2e}, more than rollout.canary_tolerance={self.tolerance:.0e}"
            )
        return difference

    def _push_adapter(self, version: int) -> None:
        weights = {name: tensor.cpu() for name, tensor in self.actor.adapter_parameters()}
        # A folder in memory where there is one.
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as place:
            folder = Path(place) / "adapter"
            save_adapters(self.actor.model, weights, self.actor.source, folder)
            self.rollout.update_adapter(folder, version)

    def _trainer_log_probs(self) -> Tensor:
        first, rest = self._canary_ids[:1], self._canary_ids[1:]
        trajectory = Trajectory(first, 0, response_ids=rest, response_mask=[1] * len(rest))
        rows: DataProto = to_batch([trajectory], len(rest))
        log_probs_BR = self.actor.compute(rows, 1.0)[0]
        return log_probs_BR[0]
