"""Measures rollout speed of the agent loop against the bare engine, and the time of weight pushes.

python -m benchmarks.rollout [REQUESTS=512] [TOKENS=512]: one process, one device. On CUDA a 0.49B model in bfloat16, on
a CPU the offline model. Each figure is the median over rounds in which both variants alternate on the same prompts and
seeds; every request samples exactly TOKENS tokens.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from benchmarks.train_step import SHAPE
from rl_core.config.schema import AgentConfig, FSDPConfig, RolloutConfig, TinyModelConfig
from rl_core.data.protocol import DataProto
from rl_core.models.load import PolicyModel, empty_causal_lm
from rl_core.models.tiny import save_tiny_model
from rl_core.rollout.agent.agent_loop import roll_out
from rl_core.rollout.engine.protocol import Sampling
from rl_core.rollout.weights.weight_sync import ShardingManager
from rl_core.training.engine import TrainEngine
from rl_core.training.mesh import make_rank_mesh

PROMPT, ROUNDS, PUSHES = 32, 3, 10


def join_alone() -> torch.device:
    """Creates a process group of this process only; returns its device."""
    on_gpu = torch.cuda.is_available()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
    return torch.device("cuda", 0) if on_gpu else torch.device("cpu")


def make_model(folder: Path, device: torch.device, length: int) -> None:
    """Saves a random checkpoint with a size suitable for the device."""
    if device.type == "cpu":
        save_tiny_model(folder, TinyModelConfig(layers=2), length, seed=0)
        return
    SHAPE.max_position_embeddings = max(length, SHAPE.max_position_embeddings)
    with device:
        AutoModelForCausalLM.from_config(SHAPE, dtype=torch.bfloat16).save_pretrained(folder)


def median_seconds(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median time of each variant, run alternately; the first round is excluded."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def main(requests: int, tokens: int) -> None:
    """Measures and prints the results."""
    from rl_core.cluster.resources import WORKER_ENV

    device = join_alone()
    os.environ |= {name: value for name, value in WORKER_ENV.items() if device.type == "cpu" or "DYNAMO" not in name}
    torch.set_num_threads(1)
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model(folder, device, PROMPT + tokens)
        from rl_core.rollout.engine.vllm_engine import VLLMEngine, sampling_params

        settings = RolloutConfig(max_num_seqs=requests, kv_cache_gb=1, gpu_memory_utilization=0.5)
        engine = VLLMEngine(folder, settings, dtype, PROMPT + tokens, device)
        engine.sleep()
        ranks = make_rank_mesh(device, 1, 1, 1)
        module = PolicyModel(empty_causal_lm(folder))
        actor = TrainEngine(module, folder, ranks, FSDPConfig(), dtype, None, 0, 8192, 0)
        sharding = ShardingManager(actor, engine, dtype, 1.0, PROMPT + tokens)
        print(f"{requests} requests × {tokens} tokens on {device.type}, {dtype}", flush=True)
        show_pushes(sharding, engine)
        prompts = torch.randint(3, 60, (requests, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
        seeds = list(range(requests))
        for log_probs in (True, False):
            sampling = Sampling(1.0, tokens, (), log_probs=log_probs)
            rows = DataProto.from_dict({}, {"prompt_ids": prompts, "seed": seeds})
            params = [sampling_params(seed, sampling) for seed in seeds]
            requested: Any = [{"prompt_token_ids": ids} for ids in prompts]
            seconds = median_seconds(
                {
                    "bare": lambda: engine._llm.generate(requested, params, use_tqdm=False),  # noqa: B023
                    "loop": lambda: asyncio.run(roll_out(engine, rows, sampling, AgentConfig())),  # noqa: B023
                },
                ROUNDS,
            )
            speed = {name: requests * tokens / value for name, value in seconds.items()}
            share = speed["loop"] / speed["bare"]
            print(
                f"{'with' if log_probs else 'without'} log-probs: bare engine {speed['bare']:,.0f} tokens/s, "
                f"agent loop {speed['loop']:,.0f} tokens/s = {share:.1%}",
                flush=True,
            )


def show_pushes(sharding: ShardingManager, engine: object) -> None:
    """Prints the time of each part of a colocated weight push."""
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.setdefault(name, []).append(1000 * (time.perf_counter() - start))

    rollout = sharding.rollout
    for version in range(PUSHES):
        whole = ((name, tensor.to(sharding.dtype)) for name, tensor in sharding.actor.full_parameters(merged=True))
        timed("push", partial(rollout.update_weights, whole, version))
        timed("wake cache", rollout.wake_up)
        timed("canary", lambda: rollout.log_probs(list(range(3, 19))))
        if version < PUSHES - 1:
            timed("sleep", rollout.sleep)
    shown = ", ".join(f"{name} {statistics.median(values):.0f} ms" for name, values in times.items())
    print(f"weights: {shown}; the first push {times['push'][0]:.0f} ms", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3] or (512, 512)))
