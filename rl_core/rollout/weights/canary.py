"""Canary: fixed tokens for which trainer and rollout engine must agree on the log-probs after every weight push."""

from dataclasses import dataclass

import torch

from rl_core.data.protocol import DataProto
from rl_core.errors import TrainingError
from rl_core.rollout.trajectory import Trajectory, to_batch
from rl_core.training.engine import TrainEngine

CANARY_TOKENS = 16


@dataclass(frozen=True)
class Canary:
    """Fixed tokens and the trainer's log-probs of them at temperature 1, from the second token on."""

    token_ids: list[int]
    log_probs: list[float]

    def difference(self, engine_log_probs: list[float], version: int, tolerance: float) -> float:
        """Maximum absolute difference to the rollout engine's log-probs after the push of a version.

        Raises TrainingError above the tolerance: rollouts would be sampled from a different policy than the trained
        one.
        """
        difference = (torch.tensor(engine_log_probs) - torch.tensor(self.log_probs)).abs().max().item()
        if not difference <= tolerance:
            raise TrainingError(
                f"after the push of weights version {version}, the rollout engine's log-probs of fixed tokens differ "
                f"from the trainer's by {difference:.2e} (limit rollout.canary_tolerance={tolerance:.0e})"
            )
        return difference


def canary_of(actor: TrainEngine, max_length: int) -> Canary:
    """Canary for the actor's current weights; collective over all ranks. `max_length` is the longest sequence in tokens
    supported by both sides."""
    generator = torch.Generator().manual_seed(0)
    # The rollout engine samples one token after the canary.
    count = min(CANARY_TOKENS, max_length - 1)
    vocab_size = actor.model.config.get_text_config().vocab_size
    first, *rest = torch.randint(0, vocab_size, (count,), generator=generator).tolist()
    trajectory = Trajectory([first], 0, response_ids=rest, response_mask=[1] * len(rest))
    rows: DataProto = to_batch([trajectory], len(rest))
    log_probs_BR = actor.compute(rows, 1.0)[0]
    return Canary([first, *rest], log_probs_BR[0].tolist())
