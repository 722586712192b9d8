"""What a rollout engine is: token ids in, token ids with log-probs out, and weights that can be replaced meanwhile."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn; temperature 0 is greedy. A response ends with a stop token or after `max_tokens`."""

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """One response: ids (its stop token included), the log-prob of each, why it ended, and the weights' version."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: Literal["stop", "length"]
    version: int


class RolloutEngine(Protocol):
    """A live engine that serves one version of the policy's weights."""

    version: int

    def generate(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[Completion]:
        """One response a prompt; the same seed gives the same response whatever else is in the batch."""
        ...

    def log_probs(self, token_ids: list[int]) -> list[float]:
        """Log-probs at temperature 1 of the given tokens, from the second on."""
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces all weights by whole tensors under their Hugging Face names; the adapter is gone afterwards."""
        ...

    def update_adapter(self, folder: Path, version: int) -> None:
        """Replaces the adapter, which acts on the weights as they are, by that of a folder in PEFT's layout."""
        ...

    def wake_up(self) -> None:
        """Takes back the memory for key/value cache."""
        ...

    def sleep(self) -> None:
        """Gives the accelerator's memory to the trainer; weights or, where there is
        one, the adapter must be updated before the next `wake_up`."""
        ...
