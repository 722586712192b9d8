"""What the workers of all roles have in common."""

import os
from datetime import timedelta
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from rl_core.config.schema import RunConfig
from rl_core.models.load import load_tokenizer
from rl_core.rewards.runner import RewardRunner
from rl_core.rollout.agent.responders import ToolResponders
from rl_core.rollout.engine.protocol import Sampling
from rl_core.rollout.scoring import TrajectoryScorer

# Seconds by which the driver notices first that a collective hangs.
LEAD_S = 60.0


class Worker:
    """A rank: its place in the process group of its worker group, and its device."""

    def __init__(self, config: RunConfig) -> None:
        """Takes the config; nothing heavy happens before `join`."""
        self.config = config
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()

    def rendezvous(self) -> tuple[str, int]:
        """Rank 0 opens the meeting point of all ranks on a free port and says where it is."""
        host = ray.util.get_node_ip_address()
        self._meeting = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._meeting.port

    def join(self, host: str, port: int) -> None:
        """Joins the process group; returns when all ranks have."""
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # vLLM reads these when it finds the group that is already there.
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
        on_gpu = torch.cuda.is_available() and self.config.trainer.device != "cpu"
        self.device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(self.config.trainer.threads_per_rank)
        store = self._meeting if rank == 0 else dist.TCPStore(host, port, is_master=False)
        # What lies in the machine's memory is exchanged over gloo also where the device has NCCL.
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=collective_timeout(self.config)
        )


def collective_timeout(config: RunConfig) -> timedelta:
    """Time that ranks wait for each other in a collective: longer than the driver waits for the call, which can say
    which rank hangs."""
    return timedelta(seconds=config.trainer.call_timeout_s + LEAD_S)


async def start_responders(config: RunConfig, source: Path) -> ToolResponders | None:
    """Who answers the policy's turns, or None in runs of one turn."""
    if not config.multi_turn:
        return None
    responders = ToolResponders(config, source)
    await responders.start()
    return responders


async def start_scoring(config: RunConfig, source: Path) -> TrajectoryScorer:
    """What scores trajectories, in processes that end with this one."""
    runner = RewardRunner(config.reward)
    await runner.start()
    return TrajectoryScorer(runner, load_tokenizer(source))


def sampling_of(config: RunConfig, temperature: float, stop_token_ids: tuple[int, ...]) -> Sampling:
    """How a run's rollouts are drawn; log-probs of a part of the vocabulary would compare with nothing."""
    rollout = config.rollout
    whole = rollout.top_p == 1 and not rollout.top_k
    return Sampling(
        temperature,
        config.data.max_response_length,
        stop_token_ids,
        rollout.top_p,
        rollout.top_k,
        rollout.log_probs and whole,
    )
