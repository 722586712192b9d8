"""The loop over real workers: when a step is committed, and what a crash between two steps costs."""

import io
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file
from support import distance
from support_training import RUNS, SMALL, Bench, records, shards

from flows.cli.replay import replay_step
from rl_core.cluster.resources import ray_session
from rl_core.cluster.roles import Roles
from rl_core.cluster.rollout_handle import ColocatedRollouts
from rl_core.config.compose import compose
from rl_core.console import Console
from rl_core.errors import InputError, Stalled, TrainingError, TransientError
from rl_core.storage import run_files
from rl_core.storage.ledger import Ledger
from rl_core.storage.run_files import step_name
from rl_core.trainer.failed_steps import failed_step

STEPS = 3
BATCH = 4


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    recipe, settings = RUNS["grpo"]
    config = compose(recipe, [*SMALL, *settings, f"trainer.steps={STEPS}", f"trainer.keep_checkpoints={STEPS}"]).config
    home = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parents[1]
    with ray_session(home, 3, False):
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
        manifest = bench.store("undisturbed").read_manifest(run_files.checkpoint(step))
        assert manifest and manifest["meta"]["upcoming"]["loader"]["positions"] == [step * BATCH]
    assert shards(bench.store("undisturbed"), 2) != shards(bench.store("undisturbed"), 3)


def test_a_crash_before_the_commit_repeats_the_step_with_the_same_result(bench: Bench, undisturbed: list[str]) -> None:
    store = bench.store("crashed")
    trainer, events = bench.start("crashed", (3, TransientError("a worker was lost")))
    with pytest.raises(TransientError, match="a worker was lost"):
        trainer.fit(STEPS)
    assert events == undisturbed[: undisturbed.index("rollouts 3") + 1]
    bench.roles.finish_checkpoint()  # real workers are gone by now; these must not write any more
    assert store.listdir(run_files.CHECKPOINTS) == [step_name(1), step_name(2)]
    assert store.committed_steps(run_files.CHECKPOINTS) == [1] and Ledger(store).read(2)["step"] == 2

    trainer, events = bench.start("crashed")
    assert trainer.step == 1 and store.listdir(run_files.CHECKPOINTS) == [step_name(1)]
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
    assert bench.store("stopped").committed_steps(run_files.CHECKPOINTS) == [1]


def test_a_run_that_is_told_to_stop_commits_the_step_that_is_under_way(bench: Bench, undisturbed: list[str]) -> None:
    seldom = bench.config.model_copy(update={"trainer": bench.config.trainer.model_copy(update={"save_every": 3})})
    trainer, events = bench.start("told to stop", config=seldom)
    # While the second step is made.
    trainer.observer.should_stop = lambda: trainer.step == 1  # type: ignore[method-assign]
    trainer.fit(STEPS)
    assert events == ["rollouts 1", "step 1", "rollouts 2", "step 2", "commit 2"] and trainer.step == 2
    trainer, events = bench.start("told to stop", config=seldom)
    trainer.fit(STEPS)
    store, wanted = bench.store("told to stop"), bench.store("undisturbed")
    assert events == ["rollouts 1", "step 3", "commit 3"] and records(store) == records(wanted)
    assert shards(store, STEPS) == shards(wanted, STEPS)


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
    manifest = stores[1].read_manifest(run_files.checkpoint(STEPS))
    assert manifest and manifest["meta"]["upcoming"]["loader"]["positions"] == [8, 4]


def test_a_run_goes_on_with_other_numbers_of_ranks(bench: Bench) -> None:
    recipe, settings = RUNS["grpo"]
    common = [*SMALL, *settings, "trainer.steps=4", "trainer.keep_checkpoints=4"]
    one, two = (compose(recipe, [*common, f"trainer.ranks_per_node={ranks}"]).config for ranks in (1, 2))
    whole, elastic = bench.store("two ranks"), bench.store("elastic")
    with closing(Roles(two, "two ranks")) as roles:
        pair = Bench(two, bench.home, roles)
        trainer, _ = pair.start("two ranks")
        trainer.fit(4)
        roles.actor.export(whole, "export")
        events = []
        for ranks, begins, until in ((pair, 0, 1), (bench, 1, 3), (pair, 3, 4)):
            trainer, seen = ranks.start("elastic", config=two if ranks is pair else one)
            assert trainer.step == begins
            trainer.fit(until)
            events += [event for event in seen if not event.startswith("rollouts")]
        roles.actor.export(elastic, "export")
    # Nothing is trained twice, and every step on the same prompts and sampled tokens.
    assert [event for event in events if event.startswith("step")] == [f"step {step}" for step in range(1, 5)]
    for step in range(1, 5):
        files = [Path(store.root, run_files.rollouts(step)) for store in (whole, elastic)]
        sampled = [pq.read_table(file, columns=["row", "seed", "prompt_ids", "responses"]) for file in files]
        assert sampled[0].equals(sampled[1]), step
    for wanted, record in zip(records(whole), records(elastic), strict=True):
        assert record == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    start, *ends = (load_file(folder / "model.safetensors") for folder in (
        bench.home / "model", Path(whole.root, "export"), Path(elastic.root, "export"),
    ))  # fmt: skip
    moved, apart = distance(ends[0], start), distance(ends[1], ends[0])
    assert moved > 1e-2 and apart < 1e-6, (moved, apart)


def test_a_step_that_failed_can_be_replayed_until_it_is_committed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bench.store("failed")
    store.write_json("run.json", {"config": bench.config.model_dump(mode="json")})
    trainer, _ = bench.start("failed")
    push = ColocatedRollouts.push_weights

    def failing(rollouts: ColocatedRollouts, version: int) -> float:
        if version == 2:
            raise TrainingError("the weights do not match\n\nand much more")
        return push(rollouts, version)

    monkeypatch.setattr(ColocatedRollouts, "push_weights", failing)
    with pytest.raises(TrainingError):
        trainer.fit(STEPS)
    assert failed_step(store, committed=1) == 2 and store.committed_steps(run_files.CHECKPOINTS) == [1]

    output = io.StringIO()
    assert replay_step(bench.home, store.url, 2, [], Console(output)) == 0, output.getvalue()
    assert "step 2 failed: the weights do not match\n" in output.getvalue()
    assert output.getvalue().count("yes\n") == 5 and f"{run_files.FAILED}/{step_name(2)}" in output.getvalue()

    monkeypatch.setattr(ColocatedRollouts, "push_weights", push)
    trainer, _ = bench.start("failed")
    trainer.fit(STEPS)
    assert store.listdir(run_files.FAILED) == [] and store.committed_steps(run_files.CHECKPOINTS) == [1, 2, 3]


def test_a_rank_that_is_stopped_costs_no_step_that_is_finished(bench: Bench, undisturbed: list[str]) -> None:
    """The last one: its worker does not answer any more."""
    store = bench.store("hung")
    trainer, events = bench.start("hung")
    actor, on_step = bench.roles.actor, trainer.observer.on_step

    def stop(record: dict[str, Any]) -> None:
        on_step(record)
        while bench.roles.written_files(store, run_files.checkpoint(1)) is None:
            time.sleep(0.05)
        os.kill(actor.ranks[0].pid, signal.SIGSTOP)
        actor.deadline = 2.0

    trainer.observer.on_step = stop  # type: ignore[method-assign]
    with pytest.raises(Stalled, match=r"generate_sequences on rank\(s\) \[0\].*\n.*is stopped by a signal"):
        trainer.fit(STEPS)
    assert store.committed_steps(run_files.CHECKPOINTS) == [] and events == ["rollouts 1", "step 1"]
    trainer.checkpointer.rescue(trainer.step, 0.0)
    assert store.committed_steps(run_files.CHECKPOINTS) == [1] and events == ["rollouts 1", "step 1", "commit 1"]
    assert shards(store, 1) == shards(bench.store("undisturbed"), 1)
    process = psutil.Process(actor.ranks[0].pid)
    bench.roles.close()
    assert not psutil.wait_procs([process], timeout=60)[1], "Ray kills what does not answer"
