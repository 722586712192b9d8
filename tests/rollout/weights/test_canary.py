"""The canary stops training whenever engine and trainer are not shown to agree."""

import math

import pytest

from rl_core.errors import TrainingError
from rl_core.rollout.weights.canary import Canary

FINE = [-1.0, -2.0, -3.0]


def test_log_probs_within_the_tolerance_pass() -> None:
    assert Canary([1, 2, 3, 4], FINE).difference([-1.0, -2.0005, -3.0], 7, 1e-3) == pytest.approx(5e-4, rel=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -2.1])
@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_other_and_not_finite_log_probs_stop_training(value: float, side: str) -> None:
    wrong = [FINE[0], value, FINE[2]]
    trainer, engine = (FINE, wrong) if side == "engine" else (wrong, FINE)
    with pytest.raises(TrainingError, match="weights version 7.*canary_tolerance=1e-03"):
        Canary([1, 2, 3, 4], trainer).difference(engine, 7, 1e-3)
