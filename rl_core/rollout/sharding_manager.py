"""Moves weights from the sharded training engine into the live rollout engine, and proves that they arrived."""

import torch
from torch import Tensor

from rl_core.data.protocol import DataProto
from rl_core.errors import TrainingError
from rl_core.rollout.agent_loop import Trajectory, to_batch
from rl_core.rollout.engine import RolloutEngine
from rl_core.training.engine import DTYPES, TrainEngine

CANARY_TOKENS = 16


class ShardingManager:
    """FSDP2 shards → whole tensors, one at a time → rollout engine, with a version and a canary."""

    def __init__(
        self,
        actor: TrainEngine,
        rollout: RolloutEngine,
        dtype: str,
        tolerance: float,
        max_length: int,
    ) -> None:
        """`max_length` is the longest sequence that both sides take, in tokens."""
        self.actor, self.rollout = actor, rollout
        self.dtype, self.tolerance = DTYPES[dtype], tolerance
        generator = torch.Generator().manual_seed(0)
        # The rollout engine samples one more token behind the canary.
        tokens = min(CANARY_TOKENS, max_length - 1)
        vocab_size = actor.model.config.get_text_config().vocab_size
        self._canary_ids = torch.randint(0, vocab_size, (tokens,), generator=generator).tolist()

    def push(self, version: int) -> float:
        """Pushes all weights and returns the canary's largest difference of log-probs.

        Raises TrainingError when trainer and engine disagree about fixed tokens: the rollouts would come from another
        policy than the one that is trained.
        """
        # The canary's forward comes first: on CUDA its activations are gone before the engine takes its memory.
        expected = self._trainer_log_probs()
        weights = ((name, tensor.to(self.dtype)) for name, tensor in self.actor.full_parameters())
        self.rollout.update_weights(weights, version)
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

    def _trainer_log_probs(self) -> Tensor:
        first, rest = self._canary_ids[:1], self._canary_ids[1:]
        trajectory = Trajectory(first, 0, response_ids=rest, response_mask=[1] * len(rest))
        rows: DataProto = to_batch([trajectory], len(rest))
        log_probs_BR = self.actor.compute(rows, 1.0)[0]
        return log_probs_BR[0]
