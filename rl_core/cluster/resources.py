"""Ray's start and end, and the preflight that shows that a pool of workers fits before anything is reserved."""

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from rl_core.config.schema import TrainerConfig
from rl_core.errors import InputError

# Unix sockets below Ray's folder must stay under 107 characters; Ray adds about 65.
LONGEST_RAY_FOLDER = 40

# What has to be in a worker's environment before it imports torch or vLLM. The engine shares the worker's process and
# its cores.
WORKER_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",  # on CPUs compiling costs seconds and gains nothing
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
    """`ranks_per_node` worker places on each of `nodes` machines, with a GPU each on CUDA."""

    nodes: int
    ranks_per_node: int
    use_gpu: bool

    @property
    def world_size(self) -> int:
        """Number of places."""
        return self.nodes * self.ranks_per_node

    def node_bundle(self) -> dict[str, float]:
        """Resources that the places of one machine take together."""
        bundle = {"CPU": float(self.ranks_per_node)}
        if self.use_gpu:
            bundle["GPU"] = float(self.ranks_per_node)
        return bundle

    def preflight(self) -> None:
        """InputError that names the short resource when the cluster cannot hold the pool."""
        need = self.node_bundle()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fitting = [have for have in nodes if all(have.get(kind, 0) >= amount for kind, amount in need.items())]
        if len(fitting) < self.nodes:
            seen = "; ".join(", ".join(f"{kind} {have.get(kind, 0):g}" for kind in need) for have in nodes)
            wanted = ", ".join(f"{kind} {amount:g}" for kind, amount in need.items())
            raise InputError(
                f"{self.nodes} machine(s) with {wanted} each",
                f"{len(nodes)} machine(s): {seen}",
                "trainer.nodes and trainer.ranks_per_node",
                "lower them, or start Ray on more machines and set RAY_ADDRESS",
            )


def resource_pool(config: TrainerConfig) -> ResourcePool:
    """The pool that the config asks for."""
    return ResourcePool(config.nodes, config.ranks_per_node, resolve_device(config) == "cuda")


def resolve_device(config: TrainerConfig) -> str:
    """`cuda` or `cpu`; InputError when CUDA is asked for and there is none."""
    import torch

    found = torch.cuda.is_available()
    if config.device == "cuda" and not found:
        raise InputError("a CUDA device", "torch sees none", "trainer.device=cuda", "set trainer.device=cpu or auto")
    return "cuda" if found and config.device != "cpu" else "cpu"


@contextlib.contextmanager
def ray_session(home: Path, world_size: int, verbose: bool) -> Iterator[None]:
    """Joins the cluster at RAY_ADDRESS or starts a local one below `home`; what was started here ends here.

    `rl_core.environment.prepare_environment` must have run before Ray was imported.
    """
    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {}
    if not address:
        folder = home / "ray"
        folder.mkdir(parents=True, exist_ok=True)
        options = {"num_cpus": max(os.cpu_count() or 1, world_size), "include_dashboard": False}
        if len(str(folder)) <= LONGEST_RAY_FOLDER:
            options["_temp_dir"] = str(folder)
    on_terminate = signal.getsignal(signal.SIGTERM)
    ray.init(
        address=address or "local",
        log_to_driver=verbose,
        logging_level=logging.INFO if verbose else logging.ERROR,
        **options,
    )
    signal.signal(signal.SIGTERM, on_terminate)  # Ray puts its own in place, which hides how the process ended
    try:
        yield
    finally:
        ray.shutdown()
