"""Ray sessions, and the resources a run requests: pools of slots, devices, and the workers' environment."""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from rl_core.cluster.address import cluster_problem
from rl_core.cluster.local_ray import LocalRay
from rl_core.config.schema import RunConfig, TrainerConfig
from rl_core.errors import InputError, TransientError

# Must be set before a worker imports torch or vLLM. The engine shares the worker's process and its cores.
WORKER_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",  # on CPUs compilation costs seconds without any gain
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def worker_env(config: TrainerConfig) -> dict[str, str]:
    """Environment of each worker process."""
    env = {**WORKER_ENV, "OMP_NUM_THREADS": str(config.threads_per_rank)}
    if resolve_device(config) == "cuda":
        del env["TORCHDYNAMO_DISABLE"]
    return env


@dataclass(frozen=True)
class ResourcePool:
    """`ranks_per_node` worker slots on each of `nodes` machines, with one GPU each on CUDA; `setting` is the config
    section that requests it."""

    nodes: int
    ranks_per_node: int
    use_gpu: bool
    setting: str = "trainer"

    @property
    def world_size(self) -> int:
        """Number of slots."""
        return self.nodes * self.ranks_per_node

    def bundle(self) -> dict[str, float]:
        """Total resources of the slots of one machine."""
        bundle = {"CPU": float(self.ranks_per_node)}
        if self.use_gpu:
            bundle["GPU"] = float(self.ranks_per_node)
        return bundle

    def rank_env(self, slot: int, group: range) -> dict[str, str]:
        """Environment variables of the rank in `slot`; `group` are the slots of its worker group."""
        return {
            "RANK": str(slot - group.start),
            "WORLD_SIZE": str(len(group)),
            # Each actor sees a single GPU, so its local rank is 0.
            "LOCAL_RANK": "0" if self.use_gpu else str(slot % self.ranks_per_node),
        }


def resource_pools(config: RunConfig) -> list[ResourcePool]:
    """The pool of the trainer, plus those of rollouts and reward model if they have separate resources."""
    on_gpu, trainer, model = resolve_device(config.trainer) == "cuda", config.trainer, config.reward.model
    pools = [ResourcePool(trainer.nodes, trainer.ranks_per_node, on_gpu)]
    if config.rollout.ranks_per_node:
        pools.append(ResourcePool(config.rollout.nodes, config.rollout.ranks_per_node, on_gpu, "rollout"))
    if model.path and model.ranks_per_node:
        pools.append(ResourcePool(model.nodes, model.ranks_per_node, on_gpu, "reward.model"))
    return pools


def shares(groups: int) -> list[float]:
    """Fractions of a slot for the worker groups that share it, in order of placement; each takes more than half of the
    remainder.

    Ray packs fractions: with equal parts, two ranks of one group would share a GPU.
    """
    parts: list[float] = []
    for _ in range(groups - 1):
        parts.append(round(0.6 * (1 - sum(parts)), 4))
    return [*parts, round(1 - sum(parts), 4)]


def resolve_device(config: TrainerConfig) -> str:
    """Returns `cuda` or `cpu`; raises InputError if CUDA is requested but not available."""
    import torch

    found = torch.cuda.is_available()
    if config.device == "cuda" and not found:
        raise InputError("a CUDA device", "torch detects none", "trainer.device=cuda", "set trainer.device=cpu or auto")
    return "cuda" if found and config.device != "cpu" else "cpu"


@contextlib.contextmanager
def ray_session(home: Path, slots: int, verbose: bool, started: LocalRay | None = None) -> Iterator[None]:
    """Joins the cluster at RAY_ADDRESS, or a local one, `started` before or here, and stops that on exit.

    The variables of `flows.home.prepare_environment` must be set before Ray is imported.
    """
    options = {"log_to_driver": verbose, "logging_level": logging.INFO if verbose else logging.ERROR}
    with contextlib.ExitStack() as ending:
        address = os.environ.get("RAY_ADDRESS")
        if not address:
            local = started or LocalRay(home, slots)
            ending.callback(local.stop)
            address = local.address()
        ending.callback(_leave)
        _join(address, options)
        yield


def _join(address: str, options: dict[str, Any]) -> None:
    """Joins a cluster. Restores the SIGTERM handler, because Ray's own one hides how the process ended."""
    if problem := cluster_problem(address):  # Ray would exit this process after a minute, without an error
        raise TransientError(f"no Ray cluster responds at {address}: {problem}")
    on_terminate = signal.getsignal(signal.SIGTERM)
    terminated = False
    try:
        ray.init(address=address, **options)
    except SystemExit:
        terminated = True
    except (ConnectionError, RuntimeError) as error:
        raise TransientError(f"Ray cannot be joined: {error}") from error
    finally:
        signal.signal(signal.SIGTERM, on_terminate)
    if terminated:
        signal.raise_signal(signal.SIGTERM)


def _leave() -> None:
    """Leaves Ray, which resets the C-level signal handlers; reinstalls Python's."""
    ray.shutdown()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.getsignal(number))


@contextlib.contextmanager
def signals_pass() -> Iterator[None]:
    """Re-raises exceptions of signal handlers that Ray wraps in a SystemError while it waits; KeyboardInterrupt is not
    wrapped."""
    try:
        yield
    except SystemError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None
