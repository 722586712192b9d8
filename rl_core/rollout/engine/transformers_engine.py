"""Rollout engine with the model code of transformers, as in training, in the current process."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl_core.config.schema import RolloutConfig
from rl_core.errors import TrainingError
from rl_core.models.conversion import persistent_buffers
from rl_core.models.load import empty_causal_lm
from rl_core.models.lora import base_name, is_adapter, load_adapters, peft_name
from rl_core.models.weights import load_weights
from rl_core.rollout.engine.coverage import require_all
from rl_core.rollout.engine.decoder import Decoder
from rl_core.rollout.engine.kv_cache import attend_with_cache
from rl_core.rollout.engine.protocol import Completion, Sampling

GIB = 1024**3


class TransformersEngine:
    """Engine of one rank, with its own copy of the weights."""

    is_follower = False

    def __init__(
        self,
        model: Path,
        config: RolloutConfig,
        dtype: str,
        max_length: int,
        device: torch.device,
        adapter_rank: int = 0,
    ) -> None:
        """`adapter_rank` is the rank of pushed adapters; 0 without adapters."""
        self._model = empty_causal_lm(model)
        load_weights(self._model, self._model, model, device)
        self._dtype: torch.dtype = getattr(torch, dtype)
        for parameter in self._model.parameters():
            self._fill(parameter, parameter.data)
        self._model.eval()
        self._on_gpu, self._takes_adapters = device.type == "cuda", adapter_rank > 0
        self._requests = Decoder(self._model, max_length, config.max_num_seqs, int(config.kv_cache_gb * GIB))
        if self._requests.cached:
            attend_with_cache(self._model)

    async def generate(self, token_ids: list[int], seed: int, sampling: Sampling) -> Completion:
        """Samples one turn after the given tokens."""
        turn = await self._requests.sample(token_ids, seed, sampling)
        return Completion(
            prompt_ids=turn.token_ids,
            token_ids=turn.sampled_ids,
            log_probs=turn.log_probs if sampling.log_probs else [],
            versions=turn.versions,
            stop_reason="stop" if turn.stopped else "length",
        )

    def log_probs(self, token_ids: list[int]) -> list[float]:
        """Log-probs of the given tokens at temperature 1, from the second token on."""
        return self._requests.log_probs(token_ids)

    async def follow(self) -> None:
        """Does nothing: the engine has one rank."""

    def finish_batch(self) -> None:
        """Does nothing: the engine has one rank."""

    @property
    def version(self) -> int:
        """Version of the current weights."""
        return self._requests.version

    def pause(self) -> None:
        """Pauses decoding; running and new requests wait until `resume`."""
        self._requests.pause()

    def resume(self) -> None:
        """Resumes decoding with the current weights."""
        self._requests.resume()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces all weights with whole tensors under their Hugging Face names, and removes the adapter."""
        named = dict(self._model.named_parameters())
        targets: dict[str, Any] = {
            base_name(name): parameter for name, parameter in named.items() if not is_adapter(name)
        }
        output, embedding = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        if output is not None and output.weight is embedding.weight:
            targets["lm_head.weight"] = output.weight  # pushed under both names
        buffers = dict(persistent_buffers(self._model))
        missing = {*targets, *buffers}
        for name, tensor in weights:
            if name in targets:
                self._fill(targets[name], tensor)
            elif name in buffers:
                buffers[name].copy_(tensor)
            else:
                raise TrainingError(f"the push of weights version {version} has {name}, which the rollout engine lacks")
            missing.discard(name)
        for name, parameter in named.items():
            if is_adapter(name):
                parameter.data = torch.zeros_like(parameter.data)
        require_all(missing, version)
        self._requests.weights_changed(version)

    def update_adapter(self, folder: Path, version: int) -> None:
        """Replaces the adapter with the one in a folder in PEFT's layout; the folder may be deleted afterwards."""
        tensors = load_adapters(self._model, folder)
        targets = {peft_name(name): each for name, each in self._model.named_parameters() if is_adapter(name)}
        for name, tensor in tensors.items():
            self._fill(targets[name], tensor)
        require_all(targets.keys() - tensors.keys(), version)
        self._requests.weights_changed(version)

    def wake_up(self) -> None:
        """Does nothing: the cache is allocated when it is needed."""

    def sleep(self) -> None:
        """Frees the memory of cache and weights; with adapters, of the cache only, as base weights are pushed once."""
        self._requests.release_cache()
        if not self._takes_adapters:
            for parameter in self._model.parameters():
                parameter.data = parameter.data.new_empty(0)
        if self._on_gpu:
            torch.cuda.empty_cache()

    def _fill(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Gives the parameter a copy of the values in the engine's data type."""
        parameter.requires_grad_(False)
        parameter.data = values.detach().to(parameter.device, self._dtype, copy=True)
