"""The loop over real workers: when a step is committed, and what a crash between two steps costs."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_training import RUNS, SMALL, Bench, records, shards

from rl_core.cluster.resources import ray_session
from rl_core.cluster.roles import Roles
from rl_core.commit import CHECKPOINTS
from rl_core.config.compose import compose
from rl_core.errors import InputError, TransientError
from rl_core.ledger import Ledger
from rl_core.storage import step_name

STEPS = 3
BATCH = 4


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    recipe, settings = RUNS["grpo"]
    config = compose(recipe, [*SMALL, *settings, f"trainer.steps={STEPS}", f"trainer.keep_checkpoints={STEPS}"]).config
    home = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parents[1]
    with ray_session(home, 1, False):
        roles = Roles(config, "bench")
        yield Bench(config, tmp_path_factory.mktemp("bench"), roles)
        roles.close()


@pytest.fixture(scope="module")
def undisturbed(bench: Bench) -> list[str]:
    """The events of the run "undisturbed"."""
    trainer, events = bench.start("undisturbed")
    trainer.fit(STEPS)
    return events


def test_a_step_is_committed_after_the_next_ones_rollouts_and_before_its_end(undisturbed: list[str]) -> None:
    assert undisturbed == [
        "rollouts 1", "step 1", "rollouts 2", "commit 1", "step 2", "rollouts 3", "commit 2", "step 3", "commit 3",
    ]  # fmt: skip


def test_a_manifest_holds_the_position_of_its_own_step(bench: Bench, undisturbed: list[str]) -> None:
    for step in range(1, STEPS + 1):
        manifest = bench.store("undisturbed").read_manifest(f"{CHECKPOINTS}/{step_name(step)}")
        assert manifest and manifest["meta"]["upcoming"]["loader"]["positions"] == [step * BATCH]
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


def test_a_mixture_goes_on_within_its_sources_epochs_after_a_crash(bench: Bench) -> None:
    recipe, settings = RUNS["grpo"]
    first = "{source: sort_digits, difficulty: 4, train_rows: 6, val_rows: 2, weight: 2}"
    second = "{source: copy_digits, difficulty: 4, train_rows: 5, val_rows: 2}"
    ours = ("data.source", "data.difficulty", "data.train_rows", "data.val_rows")
    small = [setting for setting in SMALL if not setting.startswith(ours)]
    mixed = [*small, *settings, f"data.mixture=[{first}, {second}]", f"trainer.steps={STEPS}"]
    config = compose(recipe, [*mixed, f"trainer.keep_checkpoints={STEPS}"]).config
    trainer, _ = bench.start("mixed", config=config)
    trainer.fit(STEPS)
    trainer, _ = bench.start("mixed and crashed", (3, TransientError("a worker was lost")), config)
    with pytest.raises(TransientError):
        trainer.fit(STEPS)
    bench.roles.finish_checkpoint()
    trainer, _ = bench.start("mixed and crashed", config=config)
    trainer.fit(STEPS)
    stores = bench.store("mixed"), bench.store("mixed and crashed")
    assert records(stores[0]) == records(stores[1]) and shards(stores[0], STEPS) == shards(stores[1], STEPS)
    manifest = stores[1].read_manifest(f"{CHECKPOINTS}/{step_name(STEPS)}")
    assert manifest and manifest["meta"]["upcoming"]["loader"]["positions"] == [8, 4]
