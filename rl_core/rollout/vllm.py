"""vLLM in this process as the rollout engine, on CPUs and on CUDA devices."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from rl_core.config.schema import RolloutConfig
from rl_core.rollout.engine import Completion, Sampling

GIB = 1024**3


class VLLMEngine:
    """One vLLM engine a process, with tensors of the trainer's process pushed into it by reference."""

    def __init__(self, model: Path, config: RolloutConfig, dtype: str, max_length: int, device: torch.device) -> None:
        self.version = -1
        self._on_gpu = device.type == "cuda"
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
        outputs = self._llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False)
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
        (output,) = self._llm.generate([TokensPrompt(prompt_token_ids=token_ids)], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        return _of_tokens(output.prompt_logprobs[1:], token_ids[1:])

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces all weights; the prefix cache, which was computed with the old ones, is cleared."""
        if self._on_gpu:
            self._llm.wake_up(tags=["weights"])
        with torch.no_grad():
            self._model_runner.reload_weights(weights_iterator=iter(weights))
        self.version = version

    def wake_up(self) -> None:
        """Takes back the memory for the key/value cache, which is empty afterwards."""
        if self._on_gpu:
            self._llm.wake_up(tags=["kv_cache"])
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the rollout engine refused to clear its prefix cache")

    def sleep(self) -> None:
        """Gives the memory of weights and cache to the trainer (on CPUs there is nothing to give)."""
        if self._on_gpu:
            self._llm.sleep(level=2)


def _of_tokens(tables: Any, token_ids: list[int]) -> list[float]:
    """The tokens' own log-probs out of vLLM's table for each place."""
    return [table[token].logprob for table, token in zip(tables, token_ids, strict=True)]
