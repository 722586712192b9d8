"""The canary stops training whenever engine and trainer are not shown to agree."""

import math
from pathlib import Path

import pytest
import torch
from support import plain_log_probs, policy_engine

from benchmarks.models import MAX_LENGTH, config_of
from rl_core.errors import TrainingError
from rl_core.models import load
from rl_core.models.parity import narrow_model
from rl_core.rollout.weights import canary as canaries
from rl_core.rollout.weights.canary import MAX_ROUNDING, Canary, canary_of, log_prob_limit
from rl_core.training.mesh import RankMesh

FINE = [-1.0, -2.0, -3.0]


def test_log_probs_within_the_tolerance_pass() -> None:
    assert Canary([1, 2, 3, 4], FINE).difference([-1.0, -2.0005, -3.0], 7, 1e-3) == pytest.approx(5e-4, rel=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -2.1])
@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_other_and_not_finite_log_probs_stop_training(value: float, side: str) -> None:
    wrong = [FINE[0], value, FINE[2]]
    trainer, engine = (FINE, wrong) if side == "engine" else (wrong, FINE)
    with pytest.raises(TrainingError, match="weights version 7.*limit 1e-03: rollout.canary_tolerance"):
        Canary([1, 2, 3, 4], trainer).difference(engine, 7, 1e-3)


def test_it_has_a_neighbour_in_its_row_that_leaks_into_it(
    tmp_path: Path, rank_mesh: RankMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow_model(config_of("lfm2"), MAX_LENGTH).save_pretrained(tmp_path)
    canary = canary_of(policy_engine(tmp_path, rank_mesh), 64)
    alone = plain_log_probs(tmp_path, canary.token_ids[:1], canary.token_ids[1:]).tolist()
    assert canary.difference(alone, 1, 1e-3) < 1e-4
    monkeypatch.setattr(load, "takes_packed_rows", lambda _: True)
    with pytest.raises(TrainingError, match="push of weights version 1.*canary_tolerance"):
        canary_of(policy_engine(tmp_path, rank_mesh), 64).difference(alone, 1, 1e-3)


def test_its_limit_in_bfloat16_is_relative_to_the_familys_rounding(tiny_model: Path, rank_mesh: RankMesh) -> None:
    exact = canary_of(policy_engine(tiny_model, rank_mesh), 64)
    rounded = canary_of(policy_engine(tiny_model, rank_mesh, dtype="bfloat16"), 64)
    assert exact.rounding == 0 and 1e-3 < rounded.rounding < 0.3
    assert rounded.difference(exact.log_probs, 1, 1e-3) > 1e-3
    limit = log_prob_limit(1e-3, rounded.rounding)
    for off, tolerance in ((1.01, 1e-3), (2.5, 2 * limit)):
        wrong = (torch.tensor(rounded.log_probs) + off * limit).tolist()
        with pytest.raises(TrainingError, match="limit"):
            rounded.difference(wrong, 1, tolerance)
    assert Canary([1, 2], [-1.0], rounding=0.1).difference([-1.0 - 0.39], 1, 1e-3) == pytest.approx(0.39)
    assert (log_prob_limit(1e-3, 10.0), log_prob_limit(0.7, 10.0)) == (MAX_ROUNDING, 0.7)


@pytest.mark.parametrize("measured", [math.nan, math.inf, None])
def test_a_rounding_error_that_cannot_be_measured_stops_training(
    measured: float | None, rank_mesh: RankMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    if measured is not None:
        monkeypatch.setattr(canaries, "_measured", lambda _, __: measured)
    with pytest.raises(TrainingError, match="rounding error of torch.bfloat16 .*/no/model cannot be measured: "):
        canaries._rounding("/no/model", torch.bfloat16)
