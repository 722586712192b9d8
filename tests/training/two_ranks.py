"""One of two ranks that train together; support_ranks.py starts both and reads what rank 0 writes.

Usage: two_ranks.py RANK 2 MODEL FOLDER DEVICE, where FOLDER holds a checkpoint `alone` of a world of one rank, and
DEVICE is cpu or cuda.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from support import LENGTHS, off_policy, policy_engine, rows_of, save, update, weights_of
from support_ranks import CONFIG, LORA, MAX_TOKENS, OPTIM

from rl_core.storage.store import Store
from rl_core.training.mesh import make_rank_mesh
from rl_core.training.sharded_checkpoint import export_model, load_engine


def main(rank: int, model: Path, folder: Path, device: str) -> None:
    torch.set_num_threads(1)
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    rank_mesh = make_rank_mesh(place, 2, 2, 1)
    store = Store(str(folder))
    # The first half of the rows is much longer, so the ranks need different numbers of micro-batches.
    mine = rows_of(LENGTHS).chunk(2)[rank]
    rows = off_policy(policy_engine(model, rank_mesh), mine)
    counts = torch.tensor([mine.batch["response_mask"].sum(), float(len(mine))])
    dist.all_reduce(counts)
    tokens, sequences = counts.tolist()

    def write(name: str, tensors: dict[str, torch.Tensor]) -> None:
        if rank == 0:
            save_file({key: value.contiguous().cpu() for key, value in tensors.items()}, folder / f"{name}.safetensors")

    engine = policy_engine(model, rank_mesh, OPTIM, MAX_TOKENS)
    shards: list[Any] = list(engine.module.parameters())
    local = sum(shard.to_local().numel() for shard in shards)
    metrics = update(engine, rows, tokens, sequences, CONFIG)
    numbers = {**{name: torch.tensor(value) for name, value in metrics.items()}, "local": torch.tensor(local)}
    write("metrics", numbers)
    write("first", weights_of(engine))
    save(engine, store, "together")
    export_model(engine, "float32", model, store, "export")
    log_probs_BR = engine.compute(mine, 1.0)[0]
    gathered = [torch.zeros_like(log_probs_BR) for _ in range(2)]
    dist.all_gather(gathered, log_probs_BR)
    write("log_probs", {"log_probs": torch.cat(gathered)})
    update(engine, rows, tokens, sequences, CONFIG)
    write("second", weights_of(engine))

    resumed = policy_engine(model, rank_mesh, OPTIM, MAX_TOKENS)
    load_engine(resumed, store, "alone")
    write("loaded", weights_of(resumed))
    update(resumed, rows, tokens, sequences, CONFIG)
    write("resumed", weights_of(resumed))

    adapted = policy_engine(model, rank_mesh, OPTIM, MAX_TOKENS, lora=LORA)
    write("lora_start", dict(adapted.adapter_parameters()))
    for _ in range(2):  # the first one leaves A as it is, since B is zero
        update(adapted, rows, tokens, sequences, CONFIG)
    write("lora", weights_of(adapted))
    write("lora_merged", {name: tensor for name, tensor in adapted.full_parameters() if name != "lm_head.weight"})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
