"""Suggestions are made for near names only, by whatever part of the library that looks up a name."""

from collections.abc import Callable

import pytest

from rl_core.algorithms.advantages import ESTIMATORS
from rl_core.algorithms.policy_losses import POLICY_LOSSES
from rl_core.config.compose import compose
from rl_core.data.sources import load_source
from rl_core.errors import InputError
from rl_core.rewards.scorers import resolve_scorer
from rl_core.rollout.tools.resolve import resolve_tools

LOOKUPS: dict[str, tuple[Callable[[str], object], str, str]] = {
    "recipe": (compose, "gsm8", "gsm8k"),
    "setting": (lambda name: compose("demo", [f"{name}=1"]), "trainer.step", "trainer.steps"),
    "last part of a setting": (lambda name: compose("demo", [f"{name}=1"]), "temprature", "rollout.temperature"),
    "override": (lambda name: compose("demo", [name]), "actor.optim.lrr", "actor.optim.lr=VALUE"),
    "setting of a long section": (lambda name: compose("demo", [f"reward.judge.{name}=1"]), "timeout", "timeout_s"),
    "setting in a list": (
        lambda name: compose("demo", [f"data.mixture=[{{source: gsm8k, {name}: 1}}]"]),
        "wieght",
        "weight",
    ),
    "source": (load_source, "sort_digit", "sort_digits"),
    "scorer": (resolve_scorer, "numerik", "numeric"),
    "tool": (lambda name: resolve_tools((name,)), "calculater", "calculator"),
    "estimator": (ESTIMATORS.resolve, "rlo", "rloo"),
    "policy loss": (POLICY_LOSSES.resolve, "clipcov", "clip_cov"),
}


@pytest.mark.parametrize("what", LOOKUPS)
def test_a_near_name_is_suggested_and_a_far_one_is_not(what: str) -> None:
    look_up, near, meant = LOOKUPS[what]
    with pytest.raises(InputError) as raised:
        look_up(near)
    assert meant in raised.value.fix
    with pytest.raises(InputError) as raised:
        look_up("qqqqxqqq")
    assert meant not in raised.value.fix and "mean" not in raised.value.fix and "nearest" not in raised.value.fix
    assert raised.value.fix
