"""Rollout engines with slots of their own: they go on while the actor trains, and may die one by one."""

import itertools
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rl_core.cluster.calls import Call, finish_together, first_settled
from rl_core.cluster.placement import Placement
from rl_core.cluster.resources import worker_env
from rl_core.cluster.rollout_worker import RolloutWorker
from rl_core.cluster.worker_group import AsyncHost, RayWorkerGroup
from rl_core.config.schema import RunConfig
from rl_core.data.protocol import DataProto
from rl_core.errors import RollforwardError, TransientError, WorkerLost

logger = logging.getLogger(__name__)

# Seconds that an engine which is started anew may take for each step of its start: the others wait for it.
REVIVAL = 300.0


class Engine:
    """One live copy of the policy: the ranks of a worker group of its own, which end together."""

    serving: Call | None = None

    def __init__(self, placement: Placement, config: RunConfig, number: int, incarnation: int, deadline: float) -> None:
        """Starts the processes; `incarnation` counts how often this engine of the pool was started."""
        size = config.rollout.tensor_parallel_size
        self.number, self.incarnation, self.deadline = number, incarnation, config.trainer.call_timeout_s
        self.lost, self.may_restart = False, True
        self.group = RayWorkerGroup(
            placement,
            RolloutWorker,
            (config,),
            worker_env(config.trainer),
            1.0,
            deadline,
            slots=range(number * size, (number + 1) * size),
            name=f"{RolloutWorker.__name__}-{number}" + (f"-incarnation-{incarnation}" if incarnation > 1 else ""),
            host=AsyncHost,
        )

    def serve(self) -> None:
        """From now on the loss of any rank is the loss of the engine."""
        if self.serving:
            return
        self.serving = self.group.serve.submit()
        self.serving.deadline = math.inf  # it has no end
        self.group.deadline = self.deadline

    def watched(self, call: Call) -> list[Call]:
        """The calls of which one is settled when a call on this engine has ended, or any of its ranks has."""
        return [call, self.serving] if self.serving else [call]


@dataclass
class Share:
    """Rows of a batch, and the engine that they are with."""

    rows: range
    engine: Engine
    call: Call


class RolloutPool:
    """All rollout engines of a run; `actor` trains what they serve."""

    def __init__(self, placement: Placement, actor: RayWorkerGroup, config: RunConfig) -> None:
        """Starts the processes, which come up while the driver goes on, until `meet` is called."""
        self.placement, self.actor, self.config = placement, actor, config
        self.redispatched = 0
        self._on_gpu = placement.pool.use_gpu
        count = config.rollout_ranks // config.rollout.tensor_parallel_size
        self._engines = [Engine(placement, config, i, 1, config.trainer.call_timeout_s) for i in range(count)]
        self._linked: list[Engine] = []
        self._why = ""

    @property
    def engines(self) -> int:
        """Engines that live, as far as is known."""
        return sum(not engine.lost for engine in self._engines)

    def meet(self) -> None:
        """Waits for the processes to be there."""
        for engine in self._engines:
            engine.group.meet()

    def init_model(self, path: str) -> None:
        """Builds the engines for the checkpoint at `path`; live ones stay."""
        self._path = path
        self._all("init_model", path)
        for engine in self._living():
            engine.serve()

    def push_weights(self, version: int) -> float:
        """Pauses all engines, sends them the actor's weights, compares their log-probs of fixed tokens with the
        actor's, and lets them go on; returns the largest difference.

        Engines that were lost before are started anew where their place is free, once. Raises TrainingError when the
        difference is above `rollout.canary_tolerance`, TransientError when no engine is left.
        """
        self._revive()
        self._all("pause")
        canary = self.actor.canary()[0]
        if self._on_gpu:
            self._broadcast(version)
        else:
            self._all("receive_weights", version, self.actor.send_weights()[0])
        tolerance = self.config.rollout.canary_tolerance
        seen = self._all("log_probs", canary.token_ids)
        difference: float = max(canary.difference(log_probs, version, tolerance) for log_probs in seen)
        self._all("resume")
        return difference

    def submit(self, prompts: DataProto, temperature: float) -> "PoolCall":
        """Starts rollouts, a part of the rows on each engine; rows that follow each other with one `uid` stay
        together."""
        return PoolCall(self, prompts, temperature)

    def generate_sequences(self, prompts: DataProto, temperature: float) -> DataProto:
        """Rollouts as by `submit`, waited for."""
        return self.submit(prompts, temperature).get()

    def sleep(self) -> None:
        """Does nothing: the engines' memory is their own."""

    def spread(self, prompts: DataProto, rows: range, temperature: float) -> list[Share]:
        """Sends rows of a batch to the living engines."""
        uids = prompts.non_tensor_batch.get("uid", range(len(prompts)))
        living = self._living()
        parts = split_rows([uids[row] for row in rows], len(living))
        shares = []
        for part, engine in zip(parts, living, strict=False):
            taken = rows[part.start : part.stop]
            call = engine.group.generate_sequences.submit(prompts[taken.start : taken.stop], temperature)
            shares.append(Share(taken, engine, call))
        return shares

    def drop(self, engine: Engine, error: WorkerLost) -> None:
        """Goes on without an engine."""
        if engine.lost:
            return
        engine.lost, self._why = True, str(error)
        engine.group.kill()  # ranks that only wait for the one that has gone
        cause = self._why.partition("\n")[0]
        logger.warning("rollout engine %d is lost, %d go on: %s", engine.number, self.engines, cause)

    def _living(self) -> list[Engine]:
        living = [engine for engine in self._engines if not engine.lost]
        if not living:
            raise TransientError(f"no rollout engine is left; the last one's end: {self._why}")
        return living

    def _all(self, method: str, *args: Any) -> list[Any]:
        """Results of a method on all living engines; those that are lost meanwhile are dropped."""
        results = []
        for engine, call in [(engine, getattr(engine.group, method).submit(*args)) for engine in self._living()]:
            try:
                results.append(first_settled(engine.watched(call)).get())
            except WorkerLost as error:
                self.drop(engine, error)
        self._living()
        return results

    def _broadcast(self, version: int) -> None:
        """Sends the weights over NCCL; an engine that is lost just then takes the actor along, which needs a new
        attempt."""
        living, size = self._living(), self.config.rollout.tensor_parallel_size
        if living != self._linked:
            host, port = self.actor.free_port()
            world_size = 1 + len(living) * size
            links = [self.actor.link_rollouts.submit(host, port, world_size)]
            for i, engine in enumerate(living):
                links.append(engine.group.link_trainer.submit(host, port, 1 + i * size, world_size))
            finish_together(links)
            self._linked = living
        receives = [engine.group.receive_weights.submit(version, []) for engine in living]
        finish_together([self.actor.send_weights.submit(), *receives])

    def _revive(self) -> None:
        """Starts lost engines anew, each once after its loss; if that fails the pool goes on without it."""
        lost = [engine for engine in self._engines if engine.lost and engine.may_restart]
        if not lost or not self.placement.whole():
            return
        begun: list[Engine] = []
        for old in lost:
            old.may_restart = False
            with _tolerated(old):
                begun.append(Engine(self.placement, self.config, old.number, old.incarnation + 1, REVIVAL))
        built: list[tuple[Engine, Call]] = []
        for engine in begun:
            with _tolerated(engine):
                engine.group.meet()
                built.append((engine, engine.group.init_model.submit(self._path)))
        for engine, call in built:
            with _tolerated(engine):
                call.get()
                engine.serve()
                self._engines[engine.number] = engine


@contextmanager
def _tolerated(engine: Engine) -> Iterator[None]:
    """Notes an error in the start of an engine, whose processes end."""
    try:
        yield
    except RollforwardError as error:
        engine.group.kill()
        logger.warning("rollout engine %d does not start again: %s", engine.number, error)


class PoolCall:
    """Rollouts of a batch that are under way on the pool."""

    def __init__(self, pool: RolloutPool, prompts: DataProto, temperature: float) -> None:
        self._pool, self._prompts, self._temperature = pool, prompts, temperature
        self._done: list[tuple[range, DataProto]] = []
        self._shares = pool.spread(prompts, range(len(prompts)), temperature)

    def get(self) -> DataProto:
        """Waits for the responses; rows are in the order of the prompts.

        What a lost engine had is sent to the others; its seeds give the same responses again. Raises TransientError
        when no engine is left or one is later than the deadline, and an engine's own error as what it is.
        """
        while self._shares:
            lost = [share for share in self._shares if share.engine.lost]
            for share in lost:
                self._shares += self._pool.spread(self._prompts, share.rows, self._temperature)
                self._shares.remove(share)
                self._pool.redispatched += len(share.rows)
            self._wait_for_one()
        self._done.sort(key=lambda part: part[0].start)
        return DataProto.concat([part for _, part in self._done])

    def _wait_for_one(self) -> None:
        """Until a share is done, or an engine is lost."""
        watched = [(call, share) for share in self._shares for call in share.engine.watched(share.call)]
        call = first_settled([call for call, _ in watched])
        share = next(share for each, share in watched if each is call)
        try:
            result = call.get()
        except WorkerLost as error:
            self._pool.drop(share.engine, error)
        else:
            self._shares.remove(share)
            self._done.append((share.rows, result))


def split_rows(uids: list[Any], parts: int) -> list[range]:
    """At most `parts` runs of rows, as equal in length as can be where neighbours with one uid stay together."""
    starts = [row for row in range(len(uids)) if row == 0 or uids[row] != uids[row - 1]] + [len(uids)]
    cuts = [min(starts, key=lambda start: abs(start - k * len(uids) / parts)) for k in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(cuts) if a < b]
