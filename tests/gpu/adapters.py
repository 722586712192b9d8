"""A policy with adapters in training and a rollout engine that gets the adapters alone, on one GPU."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main(model: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(store.port), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    from support import policy_engine, single_turns, update_alone

    from rl_core.config.schema import LoraConfig, OptimConfig, RolloutConfig
    from rl_core.data.protocol import DataProto
    from rl_core.rollout.engine.protocol import Sampling
    from rl_core.rollout.engine.vllm_engine import VLLMEngine
    from rl_core.rollout.weights.weight_sync import ShardingManager
    from rl_core.training.mesh import make_rank_mesh

    rank_mesh = make_rank_mesh(torch.device("cuda", 0), 1, 1, 1)
    lora = LoraConfig(rank=8, alpha=64)
    actor = policy_engine(model, rank_mesh, OptimConfig(lr=1e-2), 8192, dtype="bfloat16", lora=lora)
    rollout = VLLMEngine(model, RolloutConfig(gpu_memory_utilization=0.25), "bfloat16", 128, rank_mesh.device, 8)
    rollout.sleep()
    sharding = ShardingManager(actor, rollout, "bfloat16", 0.3, 128, as_adapter=True)
    sharding.push(0)
    fixed = list(range(100, 116))
    before = torch.tensor(rollout.log_probs(fixed))
    prompts = DataProto.from_dict(
        {}, {"prompt_ids": [list(range(i, i + 16)) for i in range(8)], "seed": list(range(8))}
    )
    for version in (1, 2):
        batch = single_turns(rollout, prompts, Sampling(1.0, 64, ()))
        rollout.sleep()
        old_BR = actor.compute(batch, 1.0)[0]
        advantages_BR = torch.randn(old_BR.shape, generator=torch.Generator().manual_seed(1))
        update_alone(actor, batch.union(DataProto({"old_log_probs": old_BR, "advantages": advantages_BR})))
        sharding.push(version)
    assert (torch.tensor(rollout.log_probs(fixed)) - before).abs().max() > 0.1, "the adapters change nothing"


if __name__ == "__main__":
    main(Path(sys.argv[3]))
