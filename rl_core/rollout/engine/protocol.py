"""What a rollout engine is: token ids in, token ids with log-probs out, and weights that can be replaced meanwhile."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; temperature 0 is greedy. A turn ends with a stop token or after `max_tokens`."""

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = 0
    log_probs: bool = True
    """Whether the log-prob of each token comes back; engines sample faster without."""


@dataclass(frozen=True)
class Completion:
    """One sampled turn: what the engine read and wrote (stop token included), and which weights wrote it."""

    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    """Of each token, after temperature, top-p and top-k; empty where they were not asked for."""
    versions: list[int]
    """Version of the weights that sampled each token."""
    stop_reason: Literal["stop", "length"]


class RolloutEngine(Protocol):
    """A live engine that serves one version of the policy's weights at a time."""

    @property
    def version(self) -> int:
        """Version of the weights that are served."""
        ...

    async def generate(self, token_ids: list[int], seed: int, sampling: Sampling) -> Completion:
        """One turn after the given tokens; the same seed gives the same turn whatever else is in the batch.

        Requests that are made at the same time are decoded together. A cancelled call frees its request.
        """
        ...

    def log_probs(self, token_ids: list[int]) -> list[float]:
        """Log-probs at temperature 1 of the given tokens, from the second on."""
        ...

    @property
    def is_follower(self) -> bool:
        """Whether this is a rank of the engine that only takes the steps of another one."""
        ...

    async def follow(self) -> None:
        """Takes the steps of the engine's first rank until that one has finished a batch."""
        ...

    def finish_batch(self) -> None:
        """Lets the ranks that follow go, once everything that was asked for has been sampled."""
        ...

    def pause(self) -> None:
        """Stops decoding; requests that are under way or come in wait until `resume`."""
        ...

    def resume(self) -> None:
        """Goes on decoding, with the weights that are there now; what was read under earlier weights is read again."""
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces all weights by whole tensors under their Hugging Face names; the adapter is gone afterwards.

        Requests may be under way; their next tokens are the new version's. Raises TrainingError naming what is missing
        when a weight of the engine is not among them.
        """
        ...

    def update_adapter(self, folder: Path, version: int) -> None:
        """Replaces the adapter, which acts on the weights as they are, by that of a folder in PEFT's layout."""
        ...

    def wake_up(self) -> None:
        """Takes back the memory for the key/value cache, which is empty afterwards."""
        ...

    def sleep(self) -> None:
        """Gives the accelerator's memory to the trainer; weights or, where there is one, the adapter must be updated
        before the next `wake_up`."""
        ...
