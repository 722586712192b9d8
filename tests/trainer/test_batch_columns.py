"""The table of a batch's columns in docs/architecture.md matches the batches of real training steps."""

import io
import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support_pages import table
from support_training import RUNS, SMALL, Bench, Trained

from rl_core.cluster.resources import ray_session
from rl_core.cluster.roles import Roles
from rl_core.config.compose import compose
from rl_core.config.schema import RunConfig
from rl_core.data.protocol import DataProto
from rl_core.trainer import rollout_queue
from rl_core.trainer import trainer as loop
from rl_core.trainer.reward_columns import NAMED
from rl_core.training.losses import select_tokens

PHASES = ("prompts", "rollout", "score", "log_prob", "advantage", "update")
RECIPE, SETTINGS = RUNS["ppo"]  # critic, reference, correction and named rewards
ONE_STEP = [*SMALL, *SETTINGS, "trainer.steps=1", "trainer.ranks_per_node=1"]
# Both runs share one set of workers. Only `remax` has greedy baselines, and only `gae` has values.
ESTIMATORS = ("gae", "remax")
# The rollout file has the prompts without padding as `prompt_ids`, and the scorer's name of each row.
ONLY_IN_FILES = {"data_source"}

Batches = dict[str, DataProto]
"""The batch at the end of each phase."""


@dataclass(frozen=True)
class Column:
    """A row of the table."""

    phase: str
    until: str | None
    """Phase that removes the column."""
    shape: str
    dtype: str

    def lives_at(self, phase: str) -> bool:
        """Whether a batch has the column at the end of the phase."""
        now, last = PHASES.index(phase), PHASES.index(self.until) if self.until else len(PHASES)
        return PHASES.index(self.phase) <= now < last


@pytest.fixture(scope="module")
def columns() -> dict[str, Column]:
    rows = [[cell.replace("`", "") for cell in row] for row in table("architecture", "Columns of a batch")]
    parsed = {}
    for name, phase, shape, dtype, meaning in rows:
        added, _, removed = phase.partition(", until ")
        assert name not in parsed, f"{name} is in the table twice"
        assert meaning, f"{name} has no meaning"
        parsed[name] = Column(added, removed or None, shape, dtype)
    return parsed


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[RunConfig, Batches]]:
    """The batches of one step of each run, by estimator."""
    configs = {name: compose(RECIPE, [*ONE_STEP, f"algorithm.estimator={name}"]).config for name in ESTIMATORS}
    home = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parents[1]
    with ray_session(home, configs["gae"].slots, False), closing(Roles(configs["gae"], "columns")) as roles:
        bench = Bench(configs["gae"], tmp_path_factory.mktemp("columns"), roles)
        return {name: (config, one_step(bench, name, config)) for name, config in configs.items()}


def one_step(bench: Bench, name: str, config: RunConfig) -> Batches:
    """Trains a step and returns its batch as each phase left it."""
    seen: Batches = {}

    def keep(phase: str, batch: DataProto) -> None:
        seen[phase] = DataProto(dict(batch.batch), dict(batch.non_tensor_batch))

    def watch(patch: pytest.MonkeyPatch, owner: Any, function: str, phase: str, result: bool) -> None:
        """Keeps the batch that a function takes, or that it returns alone or first in a tuple."""
        original = getattr(owner, function)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not result:
                keep(phase, args[0])
            returned = original(*args, **kwargs)
            if result:
                keep(phase, returned[0] if isinstance(returned, tuple) else returned)
            return returned

        patch.setattr(owner, function, watched)

    with pytest.MonkeyPatch.context() as patch:
        trainer, _ = bench.start(name, config=config)
        watch(patch, rollout_queue, "prompt_batch", "prompts", result=True)
        watch(patch, trainer.queue, "take", "rollout", result=True)
        watch(patch, trainer.sampler, "batch", "score", result=True)
        watch(patch, loop, "apply_correction_and_kl", "log_prob", result=False)
        watch(patch, loop, "training_rows", "advantage", result=False)
        trainer.fit(1)
    rows = seen["advantage"]
    # The workers add the last column to their own copies of the rows, by this function.
    keep("update", select_tokens(config, rows, rows.batch["old_log_probs"], 0))
    return seen


def name_in_table(column: str) -> str:
    return f"{NAMED}<name>" if column.startswith(NAMED) else column


@pytest.mark.parametrize("phase", PHASES)
def test_a_batch_has_the_columns_of_the_table(
    columns: dict[str, Column], batches: dict[str, tuple[RunConfig, Batches]], phase: str
) -> None:
    found = {name_in_table(name) for _, seen in batches.values() for name in seen[phase].columns}
    listed = {name for name, column in columns.items() if column.lives_at(phase)}
    assert found - listed == set(), "not in the table"
    assert listed - found == set(), "in no batch"


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_shapes_and_types_are_those_of_the_table(
    columns: dict[str, Column], batches: dict[str, tuple[RunConfig, Batches]], estimator: str
) -> None:
    config, seen = batches[estimator]
    for phase, batch in seen.items():
        sizes = {"B": len(batch), "R": config.data.max_response_length}
        if "prompts" in batch.batch:
            sizes["P"] = batch.batch["prompts"].shape[1]
            assert sizes["P"] >= batch.batch["prompt_length"].max()
        assert len(set(sizes.values())) == len(sizes), "equal sizes would hide a wrong shape"
        for name, tensor in batch.batch.items():
            column = columns[name_in_table(name)]
            where = f"{name} after {phase}"
            assert tuple(tensor.shape) == tuple(sizes[axis] for axis in column.shape.strip("[]").split(", ")), where
            assert str(tensor.dtype) == f"torch.{column.dtype}", where
        for name, array in batch.non_tensor_batch.items():
            column = columns[name]
            assert column.shape == "[B]", name
            assert [value for value in array if not is_of(value, column.dtype)] == [], f"{name} after {phase}"


def is_of(value: Any, dtype: str) -> bool:
    """Whether a Python value has the type: its name, or `list[…]` with that of the entries."""
    outer, _, inner = dtype.rstrip("]").partition("[")
    return type(value).__name__ == outer and (not inner or {type(entry).__name__ for entry in value} <= {inner})


def test_the_columns_of_every_runs_rollout_files_are_in_the_table(trained: Trained, columns: dict[str, Column]) -> None:
    for run in trained.configs:
        (file, *_) = sorted((trained.home / "runs" / run / "rollouts").glob("*.parquet"))
        names = {name_in_table(name) for name in pq.read_schema(io.BytesIO(file.read_bytes())).names}
        assert names - columns.keys() - ONLY_IN_FILES == set(), run
