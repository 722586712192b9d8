"""A group of Ray actors, one a rank, that is called like one object."""

import inspect
from collections import Counter, defaultdict, deque
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_core.cluster.calls import Call
from rl_core.cluster.dispatch import Dispatch, Layout, collect, split
from rl_core.cluster.placement import Placement
from rl_core.cluster.stall import RankProcess, offer_stacks
from rl_core.data.protocol import DataProto
from rl_core.errors import TransientError

# Calls of a method whose seconds are remembered.
RECENT = 20


class Host:
    """The actor of a rank: it makes its worker and calls the worker's methods.

    The worker is made by a call, so that an error in its constructor reaches the driver like that of any method.
    """

    def offer_stacks(self) -> RankProcess:
        """Where this process says what it is doing when it no longer answers."""
        return offer_stacks()

    def start(self, worker_class: type, args: tuple[Any, ...]) -> None:
        """Makes the worker."""
        self.worker = worker_class(*args)

    def call(self, method: str, answers: bool, *args: Any) -> Any:
        """Runs a method; a rank that does not answer keeps its result, which another rank has too."""
        result = getattr(self.worker, method)(*args)
        return result if answers else None


class AsyncHost(Host):
    """The actor of a rank whose methods may be coroutines: all run in one event loop, and each goes on while others
    wait."""

    async def call(self, method: str, answers: bool, *args: Any) -> Any:
        """Runs a method, and waits for it if it is a coroutine."""
        result = super().call(method, True, *args)
        if inspect.isawaitable(result):
            result = await result
        return result if answers else None


class GroupMethod:
    """A registered method of a group: called, it returns the result; `submit` returns a handle at once."""

    def __init__(self, group: "RayWorkerGroup", name: str, mode: Dispatch) -> None:
        self.group, self.name, self.mode = group, name, mode

    def __call__(self, *args: Any) -> Any:
        """Runs the method on the ranks and waits for it."""
        return self.submit(*args).get()

    def submit(self, *args: Any) -> Call:
        """Starts the method on the ranks; a rank runs what is submitted in that order."""
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
    """Ranks of one worker class in a placement; the methods marked with `@register` are the group's methods."""

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
        """Starts the actors, which have their slots when this returns; `meet` waits for their workers.

        `share` is each one's part of its slot, `deadline` the seconds of one call at most. A group may take some of
        the `slots` only; its `name` in the run is the worker class's unless it is given.
        """
        pool = placement.pool
        slots = slots or range(pool.world_size)
        self.layout = layout or Layout(len(slots))
        self.deadline, self.name = deadline, name or worker_class.__name__
        self.ranks: list[RankProcess] = []
        self.seconds: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._worker_class = worker_class
        actor_class: Any = ray.remote(type(self.name, (host,), {}))  # the name is that of the process, too
        try:
            self.workers: list[Any] = [
                actor_class.options(
                    name=f"{self.name}-{rank}",
                    namespace=placement.namespace,
                    num_cpus=share,
                    num_gpus=share if pool.use_gpu else 0,
                    max_restarts=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement_group=placement.group, placement_group_bundle_index=placement.bundle_of(slot)
                    ),
                    runtime_env={"env_vars": {**env, **pool.rank_env(slot, slots)}},
                ).remote()
                for rank, slot in enumerate(slots)
            ]
        except ActorAlreadyExistsError as error:
            raise TransientError(f"another attempt of this run is starting its workers: {error}") from error
        # Shares keep two ranks of a group off one device only if the group of the next smaller share comes after it.
        try:
            self.ranks = self._call("placing", [worker.offer_stacks.remote() for worker in self.workers]).get()
        except BaseException:
            self.kill()
            raise
        self._started = self._call("start", [worker.start.remote(worker_class, args) for worker in self.workers])

    def meet(self) -> None:
        """Waits for the ranks to be there and lets them form their process group."""
        self._started.get()
        host, port = self._call("rendezvous", [self.workers[0].call.remote("rendezvous", True)]).get()[0]
        self._call("join", [worker.call.remote("join", True, host, port) for worker in self.workers]).get()

    def kill(self) -> None:
        """Ends all ranks at once."""
        for worker in self.workers:
            ray.kill(worker, no_restart=True)

    def _call(self, method: str, refs: list[ray.ObjectRef[Any]]) -> Call:
        return Call(self.name, method, refs, self.deadline, list, self.ranks, self.seconds[method])

    def __getattr__(self, method: str) -> GroupMethod:
        mode = getattr(getattr(self._worker_class, method, None), "dispatch_mode", None)
        if mode is None:
            raise AttributeError(f"{self._worker_class.__name__} has no registered method {method!r}")
        return GroupMethod(self, method, mode)


def put_shared(calls: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The ranks' arguments with each batch that several ranks get put into the object store, once."""
    times = Counter(id(arg) for args in calls for arg in args if isinstance(arg, DataProto))
    stored: dict[int, ray.ObjectRef[Any]] = {}

    def one(arg: Any) -> Any:
        if times[id(arg)] < 2:
            return arg
        if id(arg) not in stored:
            stored[id(arg)] = ray.put(arg)
        return stored[id(arg)]

    return [tuple(map(one, args)) for args in calls]
