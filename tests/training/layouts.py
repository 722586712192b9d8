"""Worlds of ranks on several meshes that write and read each other's checkpoints; test_layouts.py reads what they did.

Usage: layouts.py MODEL FOLDER. Each world is forked from this process, which imports everything once.
"""

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support import LENGTHS, off_policy, policy_engine, rows_of, save, update, weights_of

from rl_core.config.schema import ActorConfig, OptimConfig
from rl_core.data.protocol import DataProto
from rl_core.errors import RollforwardError
from rl_core.storage.store import Store
from rl_core.training.engine import TrainEngine
from rl_core.training.mesh import make_rank_mesh
from rl_core.training.packing import split_by_tokens
from rl_core.training.sharded_checkpoint import load_engine, save_engine

# Ranks of the world, and over how many of them the weights are sharded.
LAYOUTS = {"1": (1, 1), "2": (2, 2), "4": (4, 4), "2x2": (4, 2)}
OPTIM = OptimConfig(lr=1e-3, lr_schedule="cosine", grad_clip=1e9, weight_decay=0.1)
CONFIG = ActorConfig(loss_agg_mode="seq-mean-token-mean", entropy_coef=0.01, kl_loss_coef=0.1)
SECONDS = 180


class Rank:
    """One rank of a world, with its share of the rows."""

    def __init__(self, model: Path, folder: Path, layout: str) -> None:
        self.rank_mesh = make_rank_mesh(torch.device("cpu"), *LAYOUTS[layout], sequence_parallel_size=1)
        self.model, self.folder, self.layout = model, folder, layout
        self.store, self.rank = Store(str(folder)), dist.get_rank()
        mine = rows_of(LENGTHS).chunk(dist.get_world_size())[self.rank]
        self.rows: DataProto = off_policy(policy_engine(model, self.rank_mesh), mine)

    def engine(self) -> TrainEngine:
        return policy_engine(self.model, self.rank_mesh, OPTIM, 21)

    def update(self, engine: TrainEngine) -> None:
        counts = torch.tensor([self.rows.batch["response_mask"].sum(), float(len(self.rows))])
        dist.all_reduce(counts)
        tokens, sequences = counts.tolist()
        update(engine, self.rows, tokens, sequences, CONFIG)

    def write(self, name: str, engine: TrainEngine) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in weights_of(engine).items()}
        if self.rank == 0:
            save_file({**tensors, "updates": torch.tensor(engine.updates)}, self.folder / f"{name}.safetensors")

    def report(self, **facts: object) -> None:
        """Writes this rank's facts under the name of what it did."""
        for name, fact in facts.items():
            (self.folder / f"{name}-{self.rank}.json").write_text(json.dumps(fact))


def train(rank: Rank) -> None:
    """Saves after one update and makes another one."""
    engine = rank.engine()
    rank.update(engine)
    save(engine, rank.store, f"saved/{rank.layout}")
    rank.write(f"saved-{rank.layout}", engine)
    rank.update(engine)
    rank.write(f"next-{rank.layout}", engine)


def resume(rank: Rank) -> None:
    """Loads what each layout saved and continues it."""
    for saved in LAYOUTS:
        engine = rank.engine()
        load_engine(engine, rank.store, f"saved/{saved}")
        rank.write(f"loaded-{saved}-{rank.layout}", engine)
        rank.update(engine)
        rank.write(f"next-{saved}-{rank.layout}", engine)


def train_during_a_save(rank: Rank) -> None:
    """Rank 0 begins to write only when both ranks have trained on; their messages must not meet those of the save."""
    engine, trained, write = rank.engine(), threading.Event(), dcp.save
    rank.update(engine)
    rank.write("before", engine)

    def late(*args: Any, **options: Any) -> None:
        assert trained.wait(SECONDS) if rank.rank == 0 else True
        write(*args, **options)

    with patch.object(dcp, "save", late):
        saving = save_engine(engine, rank.store, "during", dist.new_group(backend="gloo"))
        rank.update(engine)
        dist.barrier()
        begun = saving.done()
        trained.set()
        saving.result(SECONDS)
    rank.report(during=begun)
    rank.write("after", engine)
    load_engine(engine, rank.store, "during")
    rank.write("reloaded", engine)


def _error(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except RollforwardError as error:
        return [type(error).__name__, str(error)]
    return []


def refuse(rank: Rank) -> None:
    """Errors that one rank alone has reason for, and that all ranks must have together."""
    lengths = [[7, 6, 5, 4], [3, 2, 4, 1]][rank.rank]
    rank.report(parts=len(split_by_tokens(lengths, 11)), oversized=_error(lambda: split_by_tokens(lengths, 6)))
    rows = rows_of([(2, 3), (2, 3)] if rank.rank == 0 else [(2, 3), (12, 8)])
    engine = policy_engine(rank.model, rank.rank_mesh, OPTIM, 16)
    rank.report(refused=_error(lambda: update(engine, off_policy(engine, rows), 1.0, 1.0, CONFIG)))
    (rank.folder / "a_file").touch()
    store = Store(str(rank.folder / ("unwritable" if rank.rank == 0 else "a_file/unwritable")))
    rank.report(unwritable=_error(lambda: save(engine, store, "step")))
    dist.barrier()


def lose(rank: Rank) -> None:
    """Rank 1 dies while rank 0 waits for it with its save."""
    engine, group = rank.engine(), dist.new_group(backend="gloo")
    if rank.rank == 1:
        dist.barrier()
        os._exit(0)
    saving = save_engine(engine, rank.store, "lost", group)
    dist.barrier()
    rank.report(lost=_error(lambda: saving.result(SECONDS)))
    os._exit(0)


def world(model: Path, folder: Path, layout: str, work: Callable[[Rank], None]) -> None:
    """Runs `work` on all ranks of a new world; RuntimeError when one of them fails or does not end."""
    size, fork = LAYOUTS[layout][0], multiprocessing.get_context("fork")
    meeting = f"file://{folder}/{work.__name__}-{layout}"

    def run(rank: int) -> None:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
        work(Rank(model, folder, layout))
        dist.destroy_process_group()

    ranks = [fork.Process(target=run, args=(rank,)) for rank in range(size)]
    for process in ranks:
        process.start()
    until = time.monotonic() + SECONDS
    for process in ranks:
        process.join(max(0.0, until - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    if any(codes):
        raise RuntimeError(f"{work.__name__} on {layout}: exit codes {codes}")


def main(model: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    for layout in LAYOUTS:
        world(model, folder, layout, train)
    for layout in LAYOUTS:
        world(model, folder, layout, resume)
    for work in (train_during_a_save, refuse, lose):
        world(model, folder, "2", work)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
