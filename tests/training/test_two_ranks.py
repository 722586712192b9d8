"""Two processes that train together against one that trains alone."""

from pathlib import Path

import pytest
import torch
from support import LENGTHS, WIDTH, distance, plain_log_probs, policy_engine, rows_of, weights_of
from support_ranks import LORA, MAX_TOKENS, OPTIM, Alone, Outcome

from rl_core.training.mesh import RankMesh
from rl_core.training.sharded_checkpoint import load_engine


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, rank_mesh: RankMesh) -> Outcome:
    return Outcome(tmp_path_factory.mktemp("ranks"), tiny_model, rank_mesh)


def test_each_rank_holds_half_of_the_weights(outcome: Outcome, tiny_model: Path, rank_mesh: RankMesh) -> None:
    whole = sum(parameter.numel() for parameter in policy_engine(tiny_model, rank_mesh).module.parameters())
    assert whole / 2 <= outcome.read("metrics")["local"].item() < 0.51 * whole


def test_the_step_is_that_of_one_rank(outcome: Outcome) -> None:
    first = outcome.read("first")
    assert distance(first, outcome.first, "exp_avg.") < 1e-5
    assert distance(first, outcome.first, "model.") < 1e-5
    metrics = outcome.read("metrics")
    for name, value in outcome.metrics.items():
        assert metrics[name].item() == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_two_ranks_continue_the_checkpoint_of_one(outcome: Outcome) -> None:
    loaded = outcome.read("loaded")
    assert loaded.keys() == outcome.first.keys()
    assert all(torch.equal(loaded[name], outcome.first[name]) for name in loaded)
    resumed = outcome.read("resumed")
    assert distance(resumed, outcome.second, "model.") < 1e-5
    assert distance(resumed, outcome.second, "exp_avg.") < 1e-4


def test_one_rank_continues_the_checkpoint_of_two(outcome: Outcome, tiny_model: Path, rank_mesh: RankMesh) -> None:
    alone, first, second = Alone(tiny_model, rank_mesh), outcome.read("first"), outcome.read("second")
    load_engine(alone.engine, outcome.store, "together")
    loaded = weights_of(alone.engine)
    assert alone.engine.updates == 1
    assert all(torch.equal(loaded[name], first[name]) for name in first)
    alone.update()
    continued = weights_of(alone.engine)
    assert distance(continued, second, "model.") < 1e-5
    assert distance(continued, second, "exp_avg.") < 1e-4


def test_the_export_of_two_ranks_is_the_trained_model(outcome: Outcome) -> None:
    rows, log_probs_BR = rows_of(LENGTHS), outcome.read("log_probs")["log_probs"]
    assert log_probs_BR.shape == (len(LENGTHS), WIDTH)
    for i, (p, r) in enumerate(LENGTHS):
        prompt, response = rows.batch["prompts"][i, :p].tolist(), rows.batch["responses"][i, :r].tolist()
        wanted = plain_log_probs(outcome.folder / "export", prompt, response)
        torch.testing.assert_close(log_probs_BR[i, :r], wanted, rtol=0, atol=5e-6)


def test_adapters_of_two_ranks_are_those_of_one(outcome: Outcome, tiny_model: Path, rank_mesh: RankMesh) -> None:
    alone = Alone(tiny_model, rank_mesh)
    alone.engine = policy_engine(tiny_model, rank_mesh, OPTIM, MAX_TOKENS, lora=LORA)
    drawn, start = outcome.read("lora_start"), dict(alone.engine.adapter_parameters())
    assert drawn.keys() == start.keys() and all(torch.equal(drawn[name], start[name]) for name in drawn)
    alone.update()
    alone.update()
    assert distance(outcome.read("lora"), weights_of(alone.engine), "model.") < 1e-5
    assert distance(outcome.read("lora"), weights_of(alone.engine), "exp_avg.") < 1e-4
    merged = outcome.read("lora_merged")
    assert distance(merged, {n: t for n, t in alone.engine.full_parameters() if n in merged}) < 1e-5
