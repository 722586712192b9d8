"""One of several ranks that take the same training step on different meshes; rank 0 writes what came out.

Usage: meshes.py RANK WORLD_SIZE DEVICE DTYPE FOLDER MESH … with MESH = SHARD_SIZE,SEQUENCE_PARALLEL_SIZE. FOLDER holds
the models `qwen3` and `llama`.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from support import off_policy, policy_engine, rows_of, update, weights_of

from rl_core.config.schema import ActorConfig, FSDPConfig, OptimConfig
from rl_core.training.mesh import RankMesh, make_rank_mesh

LENGTHS = [(9, 8), (12, 8), (10, 7), (11, 8), (3, 1), (2, 4), (4, 2), (3, 3)]
# Several micro-batches, none of a length that divides by 4.
MAX_TOKENS = 47
CONFIG = ActorConfig(policy_loss="gspo", entropy_coef=0.01, kl_loss_coef=0.1)
MODELS = ("qwen3", "llama")


def take_step(
    model: Path, rank_mesh: RankMesh, parts: int, part: int, dtype: str, checkpointing: bool
) -> dict[str, torch.Tensor]:
    """Metrics, weights, moments (`exp_avg` is the gradient) and log-probs of a step of this rank's part of the rows."""
    optim = OptimConfig(lr=1e-3, grad_clip=0.5, weight_decay=0.1)
    config = FSDPConfig(activation_checkpointing=checkpointing)
    engine = policy_engine(model, rank_mesh, optim, MAX_TOKENS, config=config, dtype=dtype)
    whole = rows_of(LENGTHS)
    whole.batch["prompts"][7] = whole.batch["prompts"][4]  # computed once where both are in a micro-batch
    rows = off_policy(engine, whole.chunk(parts)[part])
    tokens = whole.batch["response_mask"].sum().item()
    metrics = update(engine, rows, tokens, len(whole), CONFIG)
    found = {f"metric.{name}": torch.tensor(value) for name, value in metrics.items()}
    log_probs_BR = engine.compute(rows, 0.7)[0]
    return {**found, **weights_of(engine), "old_log_probs": rows.batch["old_log_probs"], "log_probs": log_probs_BR}


def main(rank: int, world_size: int, kind: str, dtype: str, folder: Path, meshes: list[str]) -> None:
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    for name in meshes:
        shard_size, sharing = map(int, name.split(","))
        rank_mesh = make_rank_mesh(device, world_size, shard_size, sharing)
        for model in MODELS:
            outcome = take_step(folder / model, rank_mesh, world_size // sharing, rank // sharing, dtype, sharing > 1)
            if rank == 0:
                tensors = {key: value.contiguous().cpu() for key, value in outcome.items()}
                save_file(tensors, folder / f"{model}-{shard_size}-{sharing}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5]), sys.argv[6:])
