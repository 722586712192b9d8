"""Rollouts on a pool of their own: each mode over real workers, what a crash costs, and an engine that dies."""

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import ray
from support_training import SMALL, Bench, records, shards

from rl_core.cluster.resources import ray_session
from rl_core.cluster.roles import Roles
from rl_core.cluster.rollout_pool import RolloutPool
from rl_core.config.compose import compose
from rl_core.config.schema import RunConfig
from rl_core.data.loader import StatefulLoader
from rl_core.errors import TrainingError, TransientError
from rl_core.storage import run_files
from rl_core.storage.store import Store

STEPS, BATCH, ROWS = 4, 4, 32
SAME = [*SMALL, f"trainer.steps={STEPS}", f"trainer.keep_checkpoints={STEPS}"]
POOL = ["rollout.ranks_per_node=2"]
CORRECTED = ["correction.weights=token"]


def config_of(*settings: str) -> RunConfig:
    return compose("grpo", [*SAME, *settings]).config


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with ray_session(Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parents[1], 3, False):
        yield tmp_path_factory.mktemp("modes")


@pytest.fixture(scope="module")
def colocated(home: Path) -> Store:
    """A run whose engine is on the actor's place."""
    config = config_of()
    roles = Roles(config, "colocated")
    bench = Bench(config, home, roles)
    trainer, _ = bench.start("colocated")
    trainer.fit(STEPS)
    roles.close()
    return bench.store("colocated")


@pytest.fixture(scope="module")
def bench(home: Path, colocated: Store) -> Iterator[Bench]:
    """An actor and two engines beside it, for one run after the other."""
    config = config_of(*POOL)
    roles = Roles(config, "pool")
    yield Bench(config, home, roles)
    roles.close()


def rows_of(store: Store, step: int) -> list[dict[str, Any]]:
    return list(pq.read_table(io.BytesIO(store.read_bytes(run_files.rollouts(step)))).to_pylist())


def trained(store: Store, steps: int = STEPS) -> list[int]:
    """The rows of the data that each step trained on, in order."""
    return [row["row"] for step in range(1, steps + 1) for row in rows_of(store, step)[::4]]


def in_order(config: RunConfig, steps: int = STEPS) -> list[int]:
    loader = StatefulLoader([ROWS], BATCH, config.trainer.seed, "")
    return [row for _ in range(steps) for row in loader.next()]


def versions(store: Store, step: int) -> set[int]:
    return {version for row in rows_of(store, step) for version in row["version"]}


@pytest.mark.parametrize("mode", [["rollout.mode=sync"], ["rollout.mode=async", "rollout.max_staleness=0"]])
def test_rollouts_that_wait_for_their_weights_train_as_colocated_ones(
    bench: Bench, colocated: Store, mode: list[str]
) -> None:
    name = mode[0].partition("=")[2]
    trainer, events = bench.start(name, config=config_of(*POOL, *mode))
    trainer.fit(STEPS)
    assert events[:3] == ["rollouts 1", "step 1", "rollouts 2"]
    assert records(bench.store(name)) == records(colocated)
    assert shards(bench.store(name), STEPS) == shards(colocated, STEPS)


def test_one_step_off_is_one_step_behind_and_a_crash_changes_nothing(bench: Bench) -> None:
    config = config_of(*POOL, *CORRECTED, "rollout.mode=one_step_off")
    trainer, _ = bench.start("off", config=config)
    trainer.fit(STEPS)
    store = bench.store("off")
    assert [versions(store, step) for step in range(1, STEPS + 1)] == [{0}, {0}, {1}, {2}]
    assert [metrics["rollout/staleness/max"] for metrics in records(store)] == [0, 1, 1, 1]
    assert trained(store) == in_order(config)

    for error in (TransientError("a worker was lost"), TrainingError("no group is left")):
        name = f"off-{type(error).__name__}"
        trainer, _ = bench.start(name, (3, error), config)
        with pytest.raises(type(error), match=str(error)):
            trainer.fit(STEPS)
        bench.roles.finish_checkpoint()  # real workers are gone by now; these must not write any more
        trainer, _ = bench.start(name, config=config)
        assert trainer.step == 1
        trainer.fit(STEPS)
        assert records(bench.store(name)) == records(store)
        assert shards(bench.store(name), STEPS) == shards(store, STEPS)


def test_async_rollouts_are_never_too_old_and_every_row_is_trained_once(bench: Bench) -> None:
    config = config_of(*POOL, *CORRECTED, "rollout.mode=async", "rollout.max_staleness=2")
    trainer, _ = bench.start("stale", (3, TransientError("a worker was lost")), config)
    with pytest.raises(TransientError, match="a worker was lost"):
        trainer.fit(STEPS)
    bench.roles.finish_checkpoint()
    trainer, _ = bench.start("stale", config=config)
    assert trainer.step == 1
    trainer.fit(STEPS)
    store = bench.store("stale")
    for step in range(1, STEPS + 1):
        assert versions(store, step) <= set(range(max(step - 3, 0), step))
    assert max(metrics["rollout/staleness/max"] for metrics in records(store)) >= 1
    assert trained(store) == in_order(config)


def test_an_engine_that_dies_in_the_middle_changes_nothing(bench: Bench, colocated: Store) -> None:
    pool = bench.roles.rollout
    assert isinstance(pool, RolloutPool)
    trainer, _ = bench.start("died")
    pids = [ray.get(engine.group.workers[0].__ray_call__.remote(lambda host: os.getpid())) for engine in pool._engines]
    trainer.fit(1)
    trainer.queue.begin(2)
    os.kill(pids[0], signal.SIGKILL)
    trainer.fit(STEPS)
    assert records(bench.store("died")) == records(colocated)
    assert shards(bench.store("died"), STEPS) == shards(colocated, STEPS)
    assert pool.engines == 2, "it is there again"
