"""Base class and helpers of the workers of all roles."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from rl_core.cluster.network import node_address, open_store, restrict_collectives
from rl_core.config.schema import RunConfig
from rl_core.models.load import load_tokenizer
from rl_core.rewards.runner import RewardRunner
from rl_core.rollout.agent.responders import ToolResponders
from rl_core.rollout.engine.protocol import Sampling
from rl_core.rollout.scoring import TrajectoryScorer

LEAD_S = 60.0
"""Seconds by which the timeout of collectives exceeds the driver's, so that the driver detects a hang first."""


class Worker:
    """A rank: a member of its worker group's process group, with a device."""

    def __init__(self, config: RunConfig) -> None:
        """Stores the config; everything expensive happens in or after `join`."""
        self.config = config
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()

    def rendezvous(self) -> tuple[str, int]:
        """Opens the rendezvous store of all ranks on a free port of rank 0; returns its host and port."""
        host = node_address()
        self._rendezvous_store = open_store(host)
        return host, self._rendezvous_store.port

    def join(self, host: str, port: int) -> None:
        """Joins the process group; returns once all ranks have joined."""
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        restrict_collectives(node_address())
        # vLLM reads these when it joins an existing process group.
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
        on_gpu = torch.cuda.is_available() and self.config.trainer.device != "cpu"
        self.device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(self.config.trainer.threads_per_rank)
        store = self._rendezvous_store if rank == 0 else dist.TCPStore(host, port, is_master=False)
        # CPU tensors are exchanged over gloo even if the device uses NCCL.
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=collective_timeout(self.config)
        )


def collective_timeout(config: RunConfig) -> timedelta:
    """Timeout of collectives: longer than the driver's timeout of a call, as the driver can name the hanging rank."""
    return timedelta(seconds=config.trainer.call_timeout_s + LEAD_S)


async def start_responders(config: RunConfig, source: Path) -> ToolResponders | None:
    """Starts the responders to the policy's turns; None in single-turn runs."""
    if not config.multi_turn:
        return None
    responders = ToolResponders(config, source)
    await responders.start()
    return responders


async def start_scoring(config: RunConfig, source: Path) -> TrajectoryScorer:
    """Starts the scorer of trajectories; its processes end with this one."""
    runner = RewardRunner(config.reward)
    await runner.start()
    return TrajectoryScorer(runner, load_tokenizer(source))


def sampling_of(config: RunConfig, temperature: float, stop_token_ids: tuple[int, ...]) -> Sampling:
    """Sampling parameters of a run's rollouts.

    With top-p or top-k the engine's log-probs cover a truncated vocabulary and are not comparable: none are requested.
    """
    rollout = config.rollout
    full_vocabulary = rollout.top_p == 1 and not rollout.top_k
    return Sampling(
        temperature,
        config.data.max_response_length,
        stop_token_ids,
        rollout.top_p,
        rollout.top_k,
        rollout.log_probs and full_vocabulary,
    )
