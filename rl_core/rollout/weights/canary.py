"""Canary: fixed tokens for which trainer and rollout engine must agree on the log-probs after every weight push."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from rl_core.data.protocol import DataProto
from rl_core.errors import TrainingError
from rl_core.models.load import load_config
from rl_core.rollout.trajectory import Trajectory, to_batch
from rl_core.training.engine import TrainEngine

CANARY_TOKENS = 16
ROUNDINGS = 4.0
"""Limit in lower precision, in multiples of the rounding error of a narrow model: trainer and engine both round, with
different kernels and in more layers."""
MAX_ROUNDING = 0.5
"""Maximum of that limit in nats."""


@dataclass(frozen=True)
class Canary:
    """Fixed tokens and the trainer's log-probs of them at temperature 1, from the second token on; `rounding` is the
    error of log-probs by the trainer's dtype, 0 in float32."""

    token_ids: list[int]
    log_probs: list[float]
    rounding: float = 0.0

    def difference(self, engine_log_probs: list[float], version: int, tolerance: float) -> float:
        """Maximum absolute difference to the rollout engine's log-probs after the push of a version.

        Raises TrainingError above `log_prob_limit`: rollouts would be sampled from a different policy than the trained
        one.
        """
        difference = (torch.tensor(engine_log_probs) - torch.tensor(self.log_probs)).abs().max().item()
        limit = log_prob_limit(tolerance, self.rounding)
        if not difference <= limit:
            rounded = f"{ROUNDINGS:g} × the dtype's rounding error, at most {MAX_ROUNDING:g}"
            origin = "rollout.canary_tolerance" if limit == tolerance else rounded
            raise TrainingError(
                f"after the push of weights version {version}, the rollout engine's log-probs of fixed tokens differ "
                f"from the trainer's by {difference:.2e} (limit {limit:.0e}: {origin}; rollout.canary_tolerance raises "
                "it)"
            )
        return difference


def log_prob_limit(tolerance: float, rounding: float) -> float:
    """Maximum difference in nats of the same log-probs by trainer and engine: `tolerance`, or a multiple of the dtype's
    rounding error if that is larger."""
    return max(tolerance, min(ROUNDINGS * rounding, MAX_ROUNDING))


def canary_of(actor: TrainEngine, max_length: int) -> Canary:
    """Canary for the actor's current weights; collective over all ranks. `max_length` is the longest sequence in tokens
    supported by both sides.

    The trainer computes it after another sequence in the same batch: what leaks from one into the other changes its
    log-probs.
    """
    generator = torch.Generator().manual_seed(0)
    # The rollout engine samples one token after the canary.
    count = min(CANARY_TOKENS, max_length - 1)
    vocab_size = actor.model.config.get_text_config().vocab_size
    ids, before = torch.randint(0, vocab_size, (2, count), generator=generator).tolist()
    rows: DataProto = to_batch([_all_but_first(before), _all_but_first(ids)], count - 1)
    log_probs_BR = actor.compute(rows, 1.0)[0]
    return Canary(ids, log_probs_BR[1].tolist(), _rounding(str(actor.source), actor.dtype))


def _all_but_first(ids: list[int]) -> Trajectory:
    return Trajectory(ids[:1], 0, response_ids=ids[1:], response_mask=[1] * (len(ids) - 1))


@cache
def _rounding(source: str, dtype: torch.dtype) -> float:
    """The rounding error of a narrow model of the family, which rank 0 computes for all.

    Raises TrainingError on every rank if it cannot be computed.
    """
    if dtype == torch.float32:
        return 0.0
    found: list[Any] = [_measured(source, dtype) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    if not isinstance(found[0], float) or not math.isfinite(found[0]):
        raise TrainingError(f"the rounding error of {dtype} for the model in {source} cannot be measured: {found[0]}")
    return found[0]


def _measured(source: str, dtype: torch.dtype) -> float | str:
    from rl_core.models.parity import rounding  # seldom needed, and imports all of transformers' model code

    try:
        return rounding(load_config(source), dtype)
    except Exception as error:  # the other ranks wait for an answer
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
