"""Rollout engines with their own slots: they run while the actor trains, and fail independently."""

import itertools
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rl_core.cluster.calls import Call, finish_together, first_settled
from rl_core.cluster.host import AsyncHost
from rl_core.cluster.placement import Placement
from rl_core.cluster.resources import worker_env
from rl_core.cluster.rollout_worker import RolloutWorker
from rl_core.cluster.worker_group import RayWorkerGroup
from rl_core.config.schema import RunConfig
from rl_core.data.protocol import DataProto
from rl_core.errors import RollforwardError, TransientError, WorkerLost

logger = logging.getLogger(__name__)

REVIVAL = 300.0
"""Deadline in seconds of each call that restarts an engine; the other engines wait for it."""


class Engine:
    """One rollout engine: the ranks of its own worker group, which end together."""

    serving: Call | None = None

    def __init__(self, placement: Placement, config: RunConfig, number: int, incarnation: int, deadline: float) -> None:
        """Starts the processes; `incarnation` counts the starts of this engine of the pool."""
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
        """Starts serving; from now on the loss of any rank counts as the loss of the engine."""
        if self.serving:
            return
        self.serving = self.group.serve.submit()
        self.serving.deadline = math.inf  # the call never returns
        self.group.deadline = self.deadline

    def watched(self, call: Call) -> list[Call]:
        """Calls to wait for: one is settled when `call` has ended or a rank of this engine has died."""
        return [call, self.serving] if self.serving else [call]


@dataclass
class Share:
    """Rows of a batch, and the engine that processes them."""

    rows: range
    engine: Engine
    call: Call


class RolloutPool:
    """All rollout engines of a run; they serve the weights of `actor`."""

    def __init__(self, placement: Placement, actor: RayWorkerGroup, config: RunConfig) -> None:
        """Starts the processes in the background; `meet` waits for them."""
        self.placement, self.actor, self.config = placement, actor, config
        self.redispatched = 0
        self._on_gpu = placement.pool.use_gpu
        count = config.rollout_ranks // config.rollout.tensor_parallel_size
        self._engines = [Engine(placement, config, i, 1, config.trainer.call_timeout_s) for i in range(count)]
        self._linked: list[Engine] = []
        self._last_error = ""

    @property
    def engines(self) -> int:
        """Number of engines not known to be lost."""
        return sum(not engine.lost for engine in self._engines)

    def meet(self) -> None:
        """Waits until all processes have started and joined their groups."""
        for engine in self._engines:
            engine.group.meet()

    def init_model(self, path: str) -> None:
        """Builds the engines from the checkpoint at `path`; existing ones are kept."""
        self._path = path
        self._all("init_model", path)
        for engine in self._live():
            engine.serve()

    def push_weights(self, version: int) -> float:
        """Pauses all engines, pushes the actor's weights, compares log-probs of fixed tokens with the actor's, and
        resumes; returns the largest difference.

        Lost engines are restarted once before, if their slots are available. Raises TrainingError if the difference
        exceeds `rollout.canary_tolerance`, TransientError if no engine is left.
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
        """Starts rollouts with the rows split over the engines; consecutive rows with the same `uid` stay together."""
        return PoolCall(self, prompts, temperature)

    def generate_sequences(self, prompts: DataProto, temperature: float) -> DataProto:
        """Like `submit`, and waits for the responses."""
        return self.submit(prompts, temperature).get()

    def sleep(self) -> None:
        """Does nothing: the engines share no memory with training."""

    def spread(self, prompts: DataProto, rows: range, temperature: float) -> list[Share]:
        """Distributes rows of a batch over the live engines."""
        uids = prompts.non_tensor_batch.get("uid", range(len(prompts)))
        live = self._live()
        parts = split_rows([uids[row] for row in rows], len(live))
        shares = []
        for part, engine in zip(parts, live, strict=False):
            taken = rows[part.start : part.stop]
            call = engine.group.generate_sequences.submit(prompts[taken.start : taken.stop], temperature)
            shares.append(Share(taken, engine, call))
        return shares

    def drop(self, engine: Engine, error: WorkerLost) -> None:
        """Marks an engine as lost and continues without it."""
        if engine.lost:
            return
        engine.lost, self._last_error = True, str(error)
        engine.group.kill()  # the remaining ranks would wait for the lost one
        cause = self._last_error.partition("\n")[0]
        logger.warning("lost rollout engine %d, continuing with %d: %s", engine.number, self.engines, cause)

    def _live(self) -> list[Engine]:
        live = [engine for engine in self._engines if not engine.lost]
        if not live:
            raise TransientError(f"no rollout engine is left; last error: {self._last_error}")
        return live

    def _all(self, method: str, *args: Any) -> list[Any]:
        """Results of a method on all live engines; engines lost during the call are dropped."""
        results = []
        for engine, call in [(engine, getattr(engine.group, method).submit(*args)) for engine in self._live()]:
            try:
                results.append(first_settled(engine.watched(call)).get())
            except WorkerLost as error:
                self.drop(engine, error)
        self._live()
        return results

    def _broadcast(self, version: int) -> None:
        """Broadcasts the weights over NCCL; losing an engine during the broadcast also fails the actor, hence the
        attempt."""
        live, size = self._live(), self.config.rollout.tensor_parallel_size
        if live != self._linked:
            host, port = self.actor.free_port()
            world_size = 1 + len(live) * size
            links = [self.actor.link_rollouts.submit(host, port, world_size)]
            for i, engine in enumerate(live):
                links.append(engine.group.link_trainer.submit(host, port, 1 + i * size, world_size))
            finish_together(links)
            self._linked = live
        receives = [engine.group.receive_weights.submit(version, []) for engine in live]
        finish_together([self.actor.send_weights.submit(), *receives])

    def _revive(self) -> None:
        """Restarts lost engines, once per loss; if the restart fails, the pool continues without the engine."""
        lost = [engine for engine in self._engines if engine.lost and engine.may_restart]
        if not lost or not self.placement.whole():
            return
        started: list[Engine] = []
        for old in lost:
            old.may_restart = False
            with _tolerated(old):
                started.append(Engine(self.placement, self.config, old.number, old.incarnation + 1, REVIVAL))
        built: list[tuple[Engine, Call]] = []
        for engine in started:
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
    """Logs an error during the restart of an engine and kills its processes."""
    try:
        yield
    except RollforwardError as error:
        engine.group.kill()
        logger.warning("rollout engine %d failed to restart: %s", engine.number, error)


class PoolCall:
    """Handle of a batch's rollouts in flight on the pool."""

    def __init__(self, pool: RolloutPool, prompts: DataProto, temperature: float) -> None:
        self._pool, self._prompts, self._temperature = pool, prompts, temperature
        self._done: list[tuple[range, DataProto]] = []
        self._shares = pool.spread(prompts, range(len(prompts)), temperature)

    def get(self) -> DataProto:
        """Waits for the responses; rows are in the order of the prompts.

        Rows of a lost engine are sent to the others; the seeds reproduce the same responses. Raises TransientError if
        no engine is left or one exceeds the deadline, and an engine's own error unchanged.
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
        """Waits until a share is done or an engine is lost."""
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
    """Splits rows into at most `parts` ranges of about equal length; consecutive rows with one uid stay together."""
    starts = [row for row in range(len(uids)) if row == 0 or uids[row] != uids[row - 1]] + [len(uids)]
    cuts = [min(starts, key=lambda start: abs(start - k * len(uids) / parts)) for k in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(cuts) if a < b]
