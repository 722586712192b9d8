"""A group of Ray actors, one per rank, with the interface of a single worker."""

import time
from collections import Counter, defaultdict, deque
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_core.cluster.calls import Call
from rl_core.cluster.dispatch import Dispatch, Layout, collect, split
from rl_core.cluster.host import Host
from rl_core.cluster.placement import POLL, Placement
from rl_core.cluster.stall import RankProcess
from rl_core.data.protocol import DataProto
from rl_core.errors import TransientError

RECENT = 20
"""Number of recent calls per method whose durations are kept."""
NAME_PATIENCE = 10.0
"""Seconds that the name of a killed actor may stay taken."""


class GroupMethod:
    """A registered method of a group: calling it returns the result, `submit` returns a handle immediately."""

    def __init__(self, group: "RayWorkerGroup", name: str, mode: Dispatch) -> None:
        self.group, self.name, self.mode = group, name, mode

    def __call__(self, *args: Any) -> Any:
        """Runs the method on the ranks and waits for it."""
        return self.submit(*args).get()

    def submit(self, *args: Any) -> Call:
        """Starts the method on the ranks; each rank runs submitted calls in order."""
        group = self.group
        calls, padding = split(self.mode, group.layout, args)
        answering = group.layout.answering(self.mode)
        refs = [
            group.workers[rank].call.options(name=self.name).remote(self.name, rank in answering, *rank_args)
            for rank, rank_args in enumerate(put_shared(calls))
        ]
        return Call(
            group.name,
            self.name,
            refs,
            group.deadline,
            lambda results: collect(self.mode, [results[rank] for rank in answering], padding),
            group.ranks,
            group.seconds[self.name],
        )


class RayWorkerGroup:
    """Ranks of one worker class in a placement; methods marked with `@register` are available on the group."""

    def __init__(
        self,
        placement: Placement,
        worker_class: type,
        args: tuple[Any, ...],
        env: dict[str, str],
        share: float,
        deadline: float,
        layout: Layout | None = None,
        slots: range | None = None,
        name: str = "",
        host: type[Host] = Host,
    ) -> None:
        """Starts the actors, which hold their slots when this returns; `meet` waits for their workers.

        `share` is the fraction of a slot used by each actor, `deadline` the maximum duration of a call in seconds.
        `slots` restricts the group to some slots of the pool; `name` defaults to that of the worker class.
        """
        pool = placement.pool
        slots = slots or range(pool.world_size)
        self.layout = layout or Layout(len(slots))
        self.deadline, self.name = deadline, name or worker_class.__name__
        self.ranks: list[RankProcess] = []
        self.seconds: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._worker_class = worker_class
        actor_class: Any = ray.remote(type(self.name, (host,), {}))  # also sets the name of the process
        self.workers: list[Any] = [
            _start_actor(
                actor_class.options(
                    name=f"{self.name}-{rank}",
                    namespace=placement.namespace,
                    num_cpus=share,
                    num_gpus=share if pool.use_gpu else 0,
                    max_restarts=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement_group=placement.group, placement_group_bundle_index=placement.bundle_of(slot)
                    ),
                ),
                {**env, **pool.rank_env(slot, slots)},
            )
            for rank, slot in enumerate(slots)
        ]
        # Unequal shares separate ranks onto devices only if groups are placed one after another, in order of share.
        try:
            self.ranks = self._call("placing", [worker.offer_stacks.remote() for worker in self.workers]).get()
        except BaseException:
            self.kill()
            raise
        self._started = self._call("start", [worker.start.remote(worker_class, args) for worker in self.workers])

    def meet(self) -> None:
        """Waits until all ranks have started and joined their process group."""
        self._started.get()
        host, port = self._call("rendezvous", [self.workers[0].call.remote("rendezvous", True)]).get()[0]
        self._call("join", [worker.call.remote("join", True, host, port) for worker in self.workers]).get()

    def kill(self) -> None:
        """Kills all ranks immediately."""
        for worker in self.workers:
            ray.kill(worker, no_restart=True)

    def _call(self, method: str, refs: list[ray.ObjectRef[Any]]) -> Call:
        return Call(self.name, method, refs, self.deadline, list, self.ranks, self.seconds[method])

    def __getattr__(self, method: str) -> GroupMethod:
        mode = getattr(getattr(self._worker_class, method, None), "dispatch_mode", None)
        if mode is None:
            raise AttributeError(f"{self._worker_class.__name__} has no registered method {method!r}")
        return GroupMethod(self, method, mode)


def _start_actor(actor_class: Any, env: dict[str, str]) -> Any:
    """Starts a named actor.

    Ray may keep the name of a killed actor for a moment after it has left the list of actors. Raises TransientError if
    the name is still taken after NAME_PATIENCE seconds.
    """
    start = time.monotonic()
    while True:
        try:
            return actor_class.remote(env)
        except ActorAlreadyExistsError as error:
            if time.monotonic() - start > NAME_PATIENCE:
                raise TransientError(f"another attempt of this run is starting its workers: {error}") from error
        time.sleep(POLL)


def put_shared(calls: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Replaces each batch that goes to several ranks by a reference to one copy in the object store."""
    times = Counter(id(arg) for args in calls for arg in args if isinstance(arg, DataProto))
    stored: dict[int, ray.ObjectRef[Any]] = {}

    def one(arg: Any) -> Any:
        if times[id(arg)] < 2:
            return arg
        if id(arg) not in stored:
            stored[id(arg)] = ray.put(arg)
        return stored[id(arg)]

    return [tuple(map(one, args)) for args in calls]
