"""The loop over real workers: when a step is committed, and what a crash between two steps costs."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support_training import RUNS, SMALL, make_trainer

from rl_core.cluster.resources import ray_session
from rl_core.cluster.roles import Roles
from rl_core.commit import CHECKPOINTS
from rl_core.config.compose import compose
from rl_core.config.schema import RunConfig
from rl_core.errors import InputError, TransientError
from rl_core.ledger import Ledger
from rl_core.rewards.runner import RewardResult, RewardRunner
from rl_core.storage import Store, step_name
from rl_core.trainer import PPOTrainer

MOVING = re.compile(r"^(time|perf)/")
STEPS = 3
BATCH = 4


class Watched:
    """The scoring processes, which mark every batch and may fail at one."""

    def __init__(self, inner: RewardRunner, mark: Callable[[str], None]) -> None:
        self.inner, self.mark, self.batches = inner, mark, 0
        self.failure: tuple[int, Exception] | None = None

    def score(self, responses: list[str], rows: list[dict[str, Any]]) -> list[RewardResult]:
        self.batches += 1
        self.mark(f"rollouts {self.batches}")
        if self.failure and self.failure[0] == self.batches:
            raise self.failure[1]
        return self.inner.score(responses, rows)


class Bench:
    """One set of workers, for one run after the other."""

    def __init__(self, config: RunConfig, home: Path, roles: Roles, rewards: RewardRunner) -> None:
        self.config, self.home, self.roles, self.rewards = config, home, roles, rewards

    def store(self, name: str) -> Store:
        return Store(str(self.home / name))

    def start(self, name: str, failure: tuple[int, Exception] | None = None) -> tuple[PPOTrainer, list[str]]:
        """The started trainer of a run, and what it does as it does it."""
        events: list[str] = []
        watched = Watched(self.rewards, events.append)
        watched.failure = failure
        trainer = make_trainer(
            self.store(name), self.config, self.home / "model", self.roles, watched,  # type: ignore[arg-type]
            lambda record: events.append(f"step {record['step']}"), lambda step: events.append(f"commit {step}"),
        )  # fmt: skip
        trainer.start(str(self.home / "model"))
        return trainer, events


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    recipe, settings = RUNS["grpo"]
    config = compose(recipe, [*SMALL, *settings, f"trainer.steps={STEPS}", f"trainer.keep_checkpoints={STEPS}"]).config
    home = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parents[1]
    with ray_session(home, 1, False), RewardRunner(config.reward) as rewards:
        roles = Roles(config, "bench")
        yield Bench(config, tmp_path_factory.mktemp("bench"), roles, rewards)
        roles.close()


@pytest.fixture(scope="module")
def undisturbed(bench: Bench) -> list[str]:
    """The events of the run "undisturbed"."""
    trainer, events = bench.start("undisturbed")
    trainer.fit(STEPS)
    return events


def records(store: Store) -> list[dict[str, float]]:
    found = [record["metrics"] for record in Ledger(store).records(STEPS)]
    return [{name: value for name, value in metrics.items() if not MOVING.match(name)} for metrics in found]


def shards(store: Store, step: int) -> dict[str, str]:
    manifest = store.read_manifest(f"{CHECKPOINTS}/{step_name(step)}")
    assert manifest is not None
    # The description beside the shards has an identity of its own for every save.
    return {file["path"]: file["sha256"] for file in manifest["files"] if file["path"].endswith(".distcp")}


def test_a_step_is_committed_after_the_next_ones_rollouts_and_before_its_end(undisturbed: list[str]) -> None:
    assert undisturbed == [
        "rollouts 1", "step 1", "rollouts 2", "commit 1", "step 2", "rollouts 3", "commit 2", "step 3", "commit 3",
    ]  # fmt: skip


def test_a_manifest_holds_the_position_of_its_own_step(bench: Bench, undisturbed: list[str]) -> None:
    for step in range(1, STEPS + 1):
        manifest = bench.store("undisturbed").read_manifest(f"{CHECKPOINTS}/{step_name(step)}")
        assert manifest and manifest["meta"]["upcoming"]["loader"]["consumed"] == step * BATCH
    assert shards(bench.store("undisturbed"), 2) != shards(bench.store("undisturbed"), 3)


def test_a_crash_before_the_commit_repeats_the_step_with_the_same_result(bench: Bench, undisturbed: list[str]) -> None:
    store = bench.store("crashed")
    trainer, events = bench.start("crashed", (3, TransientError("a worker was lost")))
    with pytest.raises(TransientError, match="a worker was lost"):
        trainer.fit(STEPS)
    assert events == undisturbed[: undisturbed.index("rollouts 3") + 1]
    bench.roles.finish_checkpoint()  # real workers are gone by now; these must not write any more
    assert store.listdir(CHECKPOINTS) == [step_name(1), step_name(2)]
    assert store.committed_steps(CHECKPOINTS) == [1] and Ledger(store).read(2)["step"] == 2

    trainer, events = bench.start("crashed")
    assert trainer.step == 1 and store.listdir(CHECKPOINTS) == [step_name(1)]
    trainer.fit(STEPS)
    assert events == ["rollouts 1", "step 2", "rollouts 2", "commit 2", "step 3", "commit 3"]
    wanted = bench.store("undisturbed")
    assert records(store) == records(wanted)
    assert shards(store, STEPS) and shards(store, STEPS) == shards(wanted, STEPS)


def test_a_run_that_has_to_stop_keeps_the_step_before(bench: Bench) -> None:
    trainer, events = bench.start("stopped", (2, InputError("a", "b", "c", "d")))
    with pytest.raises(InputError):
        trainer.fit(STEPS)
    assert events == ["rollouts 1", "step 1", "rollouts 2", "commit 1"]
    assert bench.store("stopped").committed_steps(CHECKPOINTS) == [1]
