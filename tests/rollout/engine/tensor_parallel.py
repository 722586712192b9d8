"""Two ranks that serve one model together: what they sample and say of fixed tokens, printed by the first."""

import asyncio
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main(rank: int, world_size: int, model: Path, store: Path, device: str) -> None:
    from rl_core.cluster.resources import WORKER_ENV

    env = {name: value for name, value in WORKER_ENV.items() if device == "cpu" or "DYNAMO" not in name}
    os.environ |= {**env, "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=dist.FileStore(str(store), world_size), rank=rank, world_size=world_size)
    from safetensors.torch import load_file
    from support import complete

    from rl_core.config.schema import RolloutConfig
    from rl_core.rollout.engine.protocol import Sampling
    from rl_core.rollout.engine.vllm_engine import VLLMEngine

    settings = RolloutConfig(kv_cache_gb=0.0625, gpu_memory_utilization=0.2, tensor_parallel_size=world_size)
    engine = VLLMEngine(model, settings, "float32", 64, torch.device(device))
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    engine.update_weights(iter(weights.items()), 5)
    fixed = list(range(7, 20))
    log_probs = engine.log_probs(fixed)
    turns = []
    for _ in range(2):
        if engine.is_follower:
            asyncio.run(engine.follow())
            continue
        turns = complete(engine, [[4, 8, 9], [4, 30], [40]], [1, 2, 3], Sampling(1.0, 8, ()))
        engine.finish_batch()
    if rank == 0:
        told = {"log_probs": log_probs, "ids": [turn.token_ids for turn in turns], "versions": turns[0].versions}
        store.with_suffix(".json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
