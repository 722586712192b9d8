"""vLLM in this process as the rollout engine, on CPUs and on CUDA devices."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from vllm import LLM, RequestOutput, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest

from rl_core.config.schema import RolloutConfig
from rl_core.rollout.engine import Completion, Sampling

GIB = 1024**3
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM reserves memory


class VLLMEngine:
    """One vLLM engine a process, with tensors of the trainer's process pushed into it by reference."""

    def __init__(
        self,
        model: Path,
        config: RolloutConfig,
        dtype: str,
        max_length: int,
        device: torch.device,
        adapter_rank: int = 0,
    ) -> None:
        """`adapter_rank` is that of the adapters that will be pushed; 0 when there are none."""
        self.version = -1
        self._on_gpu = device.type == "cuda"
        self._adapter: LoRARequest | None = None
        self._adapter_numbers = itertools.count(1)
        # With adapters the weights are pushed only once, so they wait in the machine's memory while the engine sleeps.
        self._sleep_level = 1 if adapter_rank else 2
        if self._on_gpu:
            memory: dict[str, Any] = {
                "gpu_memory_utilization": config.gpu_memory_utilization,
                "enable_sleep_mode": True,
                "enforce_eager": False,
            }
        else:
            memory = {
                "kv_cache_memory_bytes": int(config.kv_cache_gb * GIB),
                "block_size": 32,  # the CPU kernels refuse 16
                "enforce_eager": True,
            }
        if adapter_rank:
            rank = next(rank for rank in ADAPTER_RANKS if rank >= adapter_rank)
            memory |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
        # "external_launcher" lets the engine live in a process that already belongs to a process group.
        self._llm = LLM(
            str(model),
            dtype=cast(Any, dtype),
            max_model_len=max_length,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max(8192, max_length),
            distributed_executor_backend="external_launcher",
            skip_tokenizer_init=True,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            disable_log_stats=True,
            seed=0,
            **memory,
        )
        core: Any = self._llm.llm_engine.engine_core
        self._model_runner = core.engine_core.model_executor.driver_worker.worker.model_runner

    def generate(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[Completion]:
        """One response a prompt, all prompts in one batch."""
        params = [
            SamplingParams(
                temperature=sampling.temperature,
                max_tokens=sampling.max_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,  # only the stop tokens that are named here end a response
                seed=seed,
                logprobs=0,
                detokenize=False,
            )
            for seed in seeds
        ]
        outputs = self._outputs(prompts, params)
        completions = []
        for output in outputs:
            (choice,) = output.outputs
            ids = list(choice.token_ids)
            log_probs = _of_tokens(choice.logprobs, ids)
            completions.append(
                Completion(ids, log_probs, "stop" if choice.finish_reason == "stop" else "length", self.version)
            )
        return completions

    def log_probs(self, token_ids: list[int]) -> list[float]:
        """Log-probs at temperature 1 of the given tokens, from the second on."""
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        (output,) = self._outputs([token_ids], [params])
        assert output.prompt_logprobs is not None
        return _of_tokens(output.prompt_logprobs[1:], token_ids[1:])

    def _outputs(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
        tokens = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        return self._llm.generate(tokens, params, use_tqdm=False, lora_request=self._adapter)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces all weights by whole tensors under their Hugging Face names; the adapter is gone afterwards."""
        if self._on_gpu:
            self._llm.wake_up(tags=["weights"])
        self._adapter = None
        with torch.no_grad():
            self._model_runner.reload_weights(weights_iterator=iter(weights))
        self.version = version

    def update_adapter(self, folder: Path, version: int) -> None:
        """Replaces the adapter by that of a folder in PEFT's layout, which may go afterwards."""
        if self._on_gpu:
            self._llm.wake_up(tags=["weights"])
        # A number that was there before would be taken for the adapter of then; the new one takes the old one's place.
        number = next(self._adapter_numbers)
        request = LoRARequest(f"adapter-{number}", number, str(folder))
        if not self._llm.llm_engine.add_lora(request):
            raise RuntimeError(f"the rollout engine refused the adapter of weights version {version}")
        self._adapter, self.version = request, version

    def wake_up(self) -> None:
        """Takes back the memory for the key/value cache, which is empty afterwards, also of prompts that it shares."""
        if self._on_gpu:
            self._llm.wake_up(tags=["kv_cache"])
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the rollout engine refused to clear its prefix cache")

    def sleep(self) -> None:
        """Gives the memory of weights and cache to the trainer (on CPUs there is nothing to give)."""
        if self._on_gpu:
            self._llm.sleep(level=self._sleep_level)


def _of_tokens(tables: Any, token_ids: list[int]) -> list[float]:
    """The tokens' own log-probs out of vLLM's table for each place."""
    return [table[token].logprob for table, token in zip(tables, token_ids, strict=True)]
