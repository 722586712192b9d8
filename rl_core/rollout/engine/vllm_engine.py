"""Rollout engine with vLLM in the current process, on CPUs and CUDA devices."""

import asyncio
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.sampling_params import RequestOutputKind

from rl_core.config.schema import RolloutConfig
from rl_core.models.conversion import Conversion
from rl_core.models.load import empty_causal_lm
from rl_core.models.weights import WeightFiles
from rl_core.rollout.engine.coverage import require_all
from rl_core.rollout.engine.protocol import Completion, Sampling
from rl_core.rollout.engine.shared_memory import SHARED_MEMORY, VLLM_PATTERN
from rl_core.rollout.engine.vllm_requests import VLLMRequest, VLLMRequests

GIB = 1024**3
CAPTURED = 512
"""Largest batch in sequences with CUDA graphs by vLLM's default; without graphs, decoding is half as fast."""
GREEDY = Sampling(0.0, 1, ())
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`, for which it reserves memory."""


class VLLMEngine:
    """vLLM engine of this process; weights are pushed by reference from tensors of the same process."""

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
        self._on_gpu = device.type == "cuda"
        self._adapter: LoRARequest | None = None
        self._adapter_numbers = itertools.count(1)
        # With adapters, the base weights are pushed only once, so they are kept in host memory during sleep.
        self._sleep_level = 1 if adapter_rank else 2
        if not self._on_gpu and config.tensor_parallel_size > 1:
            _remove_shared_memory()
        # "external_launcher" runs the engine in a process that already belongs to a process group.
        self._llm = LLM(
            str(model),
            trust_remote_code=False,
            dtype=cast(Any, dtype),
            max_model_len=max_length,
            max_num_seqs=config.max_num_seqs + 1,  # one slot for the canary
            max_num_batched_tokens=max(8192, max_length),
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=config.tensor_parallel_size,
            skip_tokenizer_init=True,
            scheduling_policy="priority",
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            disable_log_stats=True,
            seed=0,
            **_memory(config, self._on_gpu, adapter_rank),
        )
        core: Any = self._llm.llm_engine.engine_core
        self._runner = core.engine_core.model_executor.driver_worker.worker.model_runner
        self._parameters = {_plain(name) for name, _ in self._runner.get_model().named_parameters()}
        own = empty_causal_lm(model)
        self._conversion = Conversion(own, WeightFiles(model).file_of)
        self._expected = {name for name, _ in own.named_parameters()}
        self._as_stored = self._on_gpu and _keeps_layout(self._runner.get_model(), self._llm)
        self._requests = VLLMRequests(
            self._llm.llm_engine, config.tensor_parallel_size, config.max_num_seqs, max_length
        )

    async def generate(self, token_ids: list[int], seed: int, sampling: Sampling) -> Completion:
        """Samples one turn after the given tokens."""
        params = sampling_params(seed, sampling)
        request = await self._requests.run(VLLMRequest(token_ids, seed, sampling, params=params, adapter=self._adapter))
        output = request.output
        assert output
        (choice,) = output.outputs
        ids = list(choice.token_ids)
        return Completion(
            prompt_ids=output.prompt_token_ids or [],
            token_ids=ids,
            log_probs=_of_tokens(choice.logprobs, ids) if sampling.log_probs else [],
            versions=request.versions,
            stop_reason="stop" if choice.finish_reason == "stop" else "length",
        )

    def log_probs(self, token_ids: list[int]) -> list[float]:
        """Log-probs of the given tokens at temperature 1, from the second token on; empty on a follower rank."""
        if self._requests.is_follower:
            asyncio.run(self._requests.follow())
            return []
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        output = self._requests.run_now(VLLMRequest(token_ids, 0, GREEDY, params=params, adapter=self._adapter))
        self._requests.end()
        return _of_tokens(output.prompt_logprobs, token_ids)

    async def follow(self) -> None:
        """Repeats the steps of the engine's first rank until that rank has finished a batch."""
        await self._requests.follow()

    def finish_batch(self) -> None:
        """Releases the follower ranks after all requests have been completed."""
        self._requests.end()

    @property
    def version(self) -> int:
        """Version of the current weights."""
        return self._requests.version

    @property
    def is_follower(self) -> bool:
        """Whether this rank of the engine only repeats the steps of its first rank."""
        return self._requests.is_follower

    def pause(self) -> None:
        """Pauses decoding; running and new requests wait until `resume`."""
        self._requests.pause()

    def resume(self) -> None:
        """Resumes decoding with the current weights."""
        self._requests.resume()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces all weights with whole tensors under their Hugging Face names, and removes the adapter."""
        if self._on_gpu:
            self._llm.wake_up(tags=["weights"])
        self._adapter = None
        seen: set[str] = set()

        def recorded() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                seen.add(name)
                yield name, tensor

        with torch.no_grad():
            written = self._load(self._conversion.to_stored(recorded()))
        require_all((self._expected - seen) | (self._parameters - written), version)
        self._requests.weights_changed(version)

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        """Loads the weights; returns the names of the engine's parameters that were written."""
        model = self._runner.get_model()
        with _unwrapped(model):
            if self._as_stored:
                return set(model.load_weights(weights))
            if not self._on_gpu:
                _rebuild_expert_kernels(model)
            initialize_layerwise_reload(model)
            written = set(model.load_weights(weights))
            finalize_layerwise_reload(model, self._runner.model_config)
            return written

    def update_adapter(self, folder: Path, version: int) -> None:
        """Replaces the adapter with the one in a folder in PEFT's layout; the folder may be deleted afterwards."""
        if self._on_gpu:
            self._llm.wake_up(tags=["weights"])
        # vLLM caches adapters by id, so every push needs a fresh id; the new adapter takes the old one's slot.
        number = next(self._adapter_numbers)
        request = LoRARequest(f"adapter-{number}", number, str(folder))
        if not self._llm.llm_engine.add_lora(request):
            raise RuntimeError(f"the rollout engine rejected the adapter of weights version {version}")
        self._adapter = request
        self._requests.weights_changed(version)

    def wake_up(self) -> None:
        """Allocates the memory of the KV cache."""
        if self._on_gpu:
            self._llm.wake_up(tags=["kv_cache"])

    def sleep(self) -> None:
        """Frees the device memory of weights and KV cache for the trainer (no-op on CPUs)."""
        if self._on_gpu:
            self._llm.sleep(level=self._sleep_level)


def _memory(config: RolloutConfig, on_gpu: bool, adapter_rank: int) -> dict[str, Any]:
    """vLLM's arguments on memory, and on what is compiled."""
    if on_gpu:
        memory: dict[str, Any] = {
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enable_sleep_mode": True,
            "enforce_eager": False,
        }
        if config.max_num_seqs > CAPTURED:
            memory["compilation_config"] = {"max_cudagraph_capture_size": config.max_num_seqs}
    else:
        memory = {
            "kv_cache_memory_bytes": int(config.kv_cache_gb * GIB),
            "block_size": 32,  # the CPU kernels do not support 16
            "enforce_eager": True,
        }
    if adapter_rank:
        rank = next(rank for rank in ADAPTER_RANKS if rank >= adapter_rank)
        memory |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    return memory


def _remove_shared_memory() -> None:
    """Removes shared memory left by killed multi-rank CPU engines: vLLM always uses the same name, so a machine can run
    one such engine at a time."""
    dist.barrier()  # no rank of this engine has created its segment yet
    for segment in SHARED_MEMORY.glob(VLLM_PATTERN):
        segment.unlink(missing_ok=True)
    dist.barrier()


def sampling_params(seed: int, sampling: Sampling) -> SamplingParams:
    """vLLM's sampling parameters for a turn."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # only `stop_token_ids` end a turn
        seed=seed,
        logprobs=0 if sampling.log_probs else None,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _keeps_layout(model: torch.nn.Module, llm: LLM) -> bool:
    """Whether the engine keeps weights in their stored layout, so that they can be overwritten in place.

    CPU kernels, quantised weights and experts use a repacked layout; these are updated through vLLM's reload, which
    takes about twice as long.
    """
    plain = llm.llm_engine.model_config.quantization is None
    return plain and not any("MoE" in type(module).__name__ for module in model.modules())


def _rebuild_expert_kernels(model: torch.nn.Module) -> None:
    """Makes the reload build the experts' kernels again: vLLM's CPU kernels repack weights only when they are built."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


@contextmanager
def _unwrapped(model: torch.nn.Module) -> Iterator[None]:
    """Temporarily replaces adapter wrappers by the wrapped layers, because loading does not know the wrapped names."""
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if hasattr(child, "base_layer")
    ]
    for parent, name, child in wrapped:
        setattr(parent, name, child.base_layer)
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            setattr(parent, name, child)


def _plain(name: str) -> str:
    """Parameter name without the adapter's wrapper layer."""
    return name.replace(".base_layer.", ".")


def _of_tokens(table: Any, token_ids: list[int]) -> list[float]:
    """Log-probs of the tokens themselves from vLLM's flat table; a prompt's first token has none."""
    starts = [start for start, end in zip(table.start_indices, table.end_indices, strict=True) if end > start]
    own = [(table.token_ids[start], table.logprobs[start]) for start in starts]
    assert [token for token, _ in own] == token_ids[len(token_ids) - len(own) :]
    return [log_prob for _, log_prob in own]
