"""A group of Ray actors, one a rank, that is called like one object."""

import time
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_core.cluster.dispatch import Dispatch, collect, split
from rl_core.cluster.resources import ResourcePool
from rl_core.errors import RollforwardError, TransientError

# Seconds between looks at the clock while waiting; a signal is answered within this time.
POLL = 1.0


class RayWorkerGroup:
    """Ranks of one worker class in a placement group; the methods marked with `@register` are the group's methods."""

    def __init__(
        self,
        pool: ResourcePool,
        placement: PlacementGroup,
        worker_class: type,
        args: tuple[Any, ...],
        env: dict[str, str],
        share: float,
        deadline: float,
    ) -> None:
        """Starts the actors; `share` is each one's part of its place, `deadline` the seconds of one call at most."""
        self.world_size, self.deadline, self.name = pool.world_size, deadline, worker_class.__name__
        self._worker_class = worker_class
        actor_class: Any = ray.remote(worker_class)
        self._workers: list[Any] = [
            actor_class.options(
                num_cpus=share,
                num_gpus=share if pool.use_gpu else 0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=placement, placement_group_bundle_index=rank // pool.ranks_per_node
                ),
                runtime_env={
                    "env_vars": {
                        **env,
                        "RANK": str(rank),
                        "WORLD_SIZE": str(pool.world_size),
                        # With one GPU visible to each actor, every rank's own device is number 0.
                        "LOCAL_RANK": "0" if pool.use_gpu else str(rank % pool.ranks_per_node),
                    }
                },
            ).remote(*args)
            for rank in range(pool.world_size)
        ]
        host, port = self._wait("rendezvous", [self._workers[0].rendezvous.remote()])[0]
        self._wait("join", [worker.join.remote(host, port) for worker in self._workers])

    def __getattr__(self, method: str) -> Any:
        mode = getattr(getattr(self._worker_class, method, None), "dispatch_mode", None)
        if mode is None:
            raise AttributeError(f"{self._worker_class.__name__} has no registered method {method!r}")
        return lambda *args: self._call(method, mode, args)

    def _call(self, method: str, mode: Dispatch, args: tuple[Any, ...]) -> Any:
        calls, padding = split(mode, self.world_size, args)
        refs = [
            getattr(worker, method).remote(*rank_args) for worker, rank_args in zip(self._workers, calls, strict=False)
        ]
        return collect(mode, self._wait(method, refs), padding)

    def _wait(self, method: str, refs: list[ray.ObjectRef]) -> list[Any]:
        start = time.monotonic()
        pending = refs
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL)
            try:
                ray.get(done)
            except RayTaskError as error:
                # The worker's own error goes on as what it is, so that its kind decides about a retry.
                cause = error.cause
                raise (cause if isinstance(cause, RollforwardError) else error) from error
            except RayError as error:
                raise TransientError(f"a {self.name} was lost during {method}: {error}") from error
            if pending and time.monotonic() - start > self.deadline:
                late = [rank for rank, ref in enumerate(refs) if ref in pending]
                raise TransientError(
                    f"{self.name}.{method} on rank(s) {late} did not answer within {self.deadline:.0f} s "
                    "(trainer.call_timeout_s)"
                )
        return ray.get(refs)

    def close(self) -> None:
        """Ends all actors of the group."""
        for worker in self._workers:
            ray.kill(worker, no_restart=True)


class Placement:
    """The reserved places of a pool; worker groups that share them are colocated."""

    def __init__(self, pool: ResourcePool, deadline: float) -> None:
        """Reserves one bundle a machine; TransientError when the cluster does not give them in time."""
        pool.preflight()
        self.pool = pool
        strategy = "STRICT_SPREAD" if pool.nodes > 1 else "PACK"
        self.group = placement_group([pool.node_bundle()] * pool.nodes, strategy=strategy)
        if not self.group.wait(timeout_seconds=min(deadline, 120.0)):
            remove_placement_group(self.group)
            raise TransientError(f"the cluster did not free {pool.node_bundle()} on {pool.nodes} machine(s) in time")

    def close(self) -> None:
        """Gives the places back."""
        remove_placement_group(self.group)
