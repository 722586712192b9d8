"""Compares the rollout engines on a CPU: CPU seconds of a start and of the same rollouts.

python -m benchmarks.engines [CASE …]: by default all cases. Each case has a process of its own, in which the engines
alternate on one thread; 8 responses share a prompt, and each has exactly the given length. A rollout is the median of
three, a start the time beyond the imports that training needs anyway.
"""

import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.rollout import join_alone
from rl_core.config.schema import DataConfig, ModelConfig, RolloutConfig, RunConfig, TinyModelConfig
from rl_core.models.tiny import save_tiny_model
from rl_core.rollout.engine.factory import build_engine
from rl_core.rollout.engine.protocol import RolloutEngine, Sampling

N, ROUNDS = 8, 3


@dataclass(frozen=True)
class Case:
    """Shape of a random model, and of the rollouts: prompts, tokens of each, tokens of a response."""

    layers: int
    hidden: int
    prompts: int
    prompt: int
    response: int
    dtype: str = "float32"


CASES = {
    "tiny": Case(3, 64, 64, 16, 32),
    "3M": Case(4, 256, 32, 64, 64),
    "135M": Case(30, 576, 4, 64, 16),
    "135M-bfloat16": Case(30, 576, 4, 64, 16, "bfloat16"),
}


def save_model(case: Case, folder: Path) -> None:
    """The offline model, or for large ones the shape of SmolLM2-135M."""
    if case.hidden < 576:
        shape = TinyModelConfig(hidden_size=case.hidden, layers=case.layers, heads=case.hidden // 64 + 1)
        save_tiny_model(folder, shape, case.prompt + case.response, seed=0)
        return
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=case.hidden,
        intermediate_size=1536,
        num_hidden_layers=case.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def built(name: str, case: Case, folder: Path) -> tuple[RolloutEngine, float]:
    """An engine, and the CPU seconds of its import and start."""
    start = time.process_time()
    config = RunConfig(
        data=DataConfig(max_prompt_length=case.prompt, max_response_length=case.response),
        model=ModelConfig.model_validate({"dtype": case.dtype}),
        rollout=RolloutConfig.model_validate({"engine": name, "max_num_seqs": 512, "kv_cache_gb": 1.0}),
    )
    return build_engine(folder, config, torch.device("cpu")), time.process_time() - start


def sampled(engine: RolloutEngine, case: Case) -> float:
    """CPU seconds of a rollout."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 60, (case.prompts, case.prompt), generator=generator).tolist()
    sampling = Sampling(1.0, case.response, ())

    async def all_of_them() -> None:
        await asyncio.gather(*(engine.generate(prompts[i // N], i, sampling) for i in range(case.prompts * N)))

    start = time.process_time()
    asyncio.run(all_of_them())
    return time.process_time() - start


def main(names: list[str]) -> None:
    """Measures and prints a table."""
    print("| model | responses × tokens | engine | start, CPU s | rollout, CPU s | tokens per CPU s |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in names or list(CASES):
        process = multiprocessing.get_context("spawn").Process(target=measure, args=(name,))
        process.start()
        process.join()


def measure(name: str) -> None:
    """Measures a case and prints its rows."""
    from rl_core.cluster.resources import WORKER_ENV

    os.environ |= WORKER_ENV
    join_alone()
    torch.set_num_threads(1)
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        save_model(case, Path(folder))
        engines = {engine: built(engine, case, Path(folder)) for engine in ("transformers", "vllm")}
        seconds: dict[str, list[float]] = {engine: [] for engine in engines}
        for _ in range(ROUNDS):
            for key, (engine, _) in engines.items():
                seconds[key].append(sampled(engine, case))
    for key, (_, start) in engines.items():
        middle, count = statistics.median(seconds[key]), case.prompts * N
        speed = count * case.response / middle
        print(
            f"| {name} | {count} × {case.response} | {key} | {start:.1f} | {middle:.2f} | {speed:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
