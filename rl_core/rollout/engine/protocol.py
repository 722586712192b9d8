"""Interface of rollout engines: token ids in, token ids with log-probs out, with weights replaceable at run time."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters; temperature 0 is greedy. A turn ends with a stop token or after `max_tokens`."""

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = 0
    log_probs: bool = True
    """Whether to return the log-prob of each token; sampling is faster without."""


@dataclass(frozen=True)
class Completion:
    """One sampled turn: prompt, sampled tokens (including the stop token), and the weight version of each token."""

    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    """Log-prob of each token, after temperature, top-p and top-k; empty if not requested."""
    versions: list[int]
    """Version of the weights that sampled each token."""
    stop_reason: Literal["stop", "length"]


class RolloutEngine(Protocol):
    """A running engine that serves one version of the policy's weights at a time."""

    @property
    def version(self) -> int:
        """Version of the current weights."""
        ...

    async def generate(self, token_ids: list[int], seed: int, sampling: Sampling) -> Completion:
        """Samples one turn after the given tokens; the same seed gives the same turn, independent of other requests.

        Concurrent requests are decoded together. Cancelling the call aborts its request.
        """
        ...

    def log_probs(self, token_ids: list[int]) -> list[float]:
        """Log-probs of the given tokens at temperature 1, from the second token on."""
        ...

    @property
    def is_follower(self) -> bool:
        """Whether this rank of the engine only repeats the steps of its first rank."""
        ...

    async def follow(self) -> None:
        """Repeats the steps of the engine's first rank until that rank has finished a batch."""
        ...

    def finish_batch(self) -> None:
        """Releases the follower ranks after all requests have been completed."""
        ...

    def pause(self) -> None:
        """Pauses decoding; running and new requests wait until `resume`."""
        ...

    def resume(self) -> None:
        """Resumes decoding with the current weights; tokens processed with earlier weights are processed again."""
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces all weights with whole tensors under their Hugging Face names, and removes the adapter.

        Running requests continue with the new version. Raises TrainingError naming missing weights of the engine.
        """
        ...

    def update_adapter(self, folder: Path, version: int) -> None:
        """Replaces the adapter with the one in a folder in PEFT's layout; the base weights do not change."""
        ...

    def wake_up(self) -> None:
        """Allocates the memory of the KV cache, which is empty afterwards."""
        ...

    def sleep(self) -> None:
        """Frees device memory for the trainer; the weights (or the adapter, if there is one) must be updated before the
        next `wake_up`."""
        ...
