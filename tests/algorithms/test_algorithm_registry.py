"""Names of estimators and losses, and functions of one's own by import path."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_core.algorithms.advantages import ESTIMATORS
from rl_core.algorithms.policy_losses import POLICY_LOSSES
from rl_core.algorithms.registry import Registry
from rl_core.config.schema import RunConfig
from rl_core.data.protocol import DataProto
from rl_core.errors import InputError
from rl_core.trainer.advantage import compute_advantages
from rl_core.training.losses import loss_settings, policy_loss

OWN = """
from rl_core.algorithms.advantages import ESTIMATORS
from rl_core.algorithms.policy_losses import POLICY_LOSSES


def half(rewards_BR, mask_BR, group_B):
    advantages_BR = 0.5 * rewards_BR.sum(-1, keepdim=True) * mask_BR
    return advantages_BR, advantages_BR


@ESTIMATORS.register("test_discounted", needs=("gamma",))
def discounted(rewards_BR, mask_BR, group_B, gamma):
    advantages_BR = gamma * rewards_BR.sum(-1, keepdim=True) * mask_BR
    return advantages_BR, advantages_BR


@ESTIMATORS.register("test_wishful", needs=("entropy_BR",))
def wishful(rewards_BR, mask_BR, group_B, entropy_BR):
    raise AssertionError


@POLICY_LOSSES.register("test_squared", agg_mode="token-sum")
def squared(t, settings):
    return t.log_prob_BR**2, {}


not_a_function = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module with functions of one's own."""
    (tmp_path / "own_algorithms.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    for registry in (ESTIMATORS, POLICY_LOSSES):
        monkeypatch.setattr(registry, "entries", dict(registry.entries))
    monkeypatch.delitem(sys.modules, "own_algorithms", raising=False)
    return "own_algorithms"


def batch() -> DataProto:
    mask_BR = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    return DataProto(
        {
            "response_mask": mask_BR,
            "token_level_rewards": torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]]),
            "old_log_probs": -mask_BR,
            "sum_pi_squared": 0.5 * mask_BR,
            "values": 0.25 * mask_BR,
            "greedy_reward_B": torch.tensor([1.0, 1.0]),
            "reward_named/right": torch.tensor([1.0, 0.0]),
            "reward_named/short": torch.tensor([0.0, 2.0]),
        },
        {"uid": np.array(["a", "a"], dtype=object)},
    )


def run_config(**sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(sections)


@pytest.mark.parametrize("name", sorted(ESTIMATORS.entries))
def test_every_estimator_gets_what_it_needs_from_the_batch(name: str) -> None:
    seen = compute_advantages(batch(), run_config(algorithm={"estimator": name, "gamma": 0.9, "lam": 0.8}))
    for column in ("advantages", "returns"):
        assert torch.isfinite(seen.batch[column]).all() and not seen.batch[column][:, 2].any()
    assert seen.batch["advantages"].any()


def test_settings_reach_the_estimators() -> None:
    def of(**algorithm: object) -> torch.Tensor:
        return compute_advantages(batch(), run_config(algorithm=algorithm)).batch["returns"]

    assert of(estimator="reinforce_plus_plus", gamma=0.5)[0].tolist() == [1.0, 2.0, 0.0]
    assert of(estimator="gae", gamma=1.0, lam=0.0)[0].tolist() == pytest.approx([0.25, 2.0, 0.0])
    right, short = ({"estimator": "gdpo", "reward_weights": weights} for weights in (("short=0",), ("right=0",)))
    assert (of(**right)[0, 0] > 0) and (of(**short)[0, 0] < 0)


def test_an_unknown_name_is_answered_with_the_nearest_and_all() -> None:
    with pytest.raises(InputError) as caught:
        ESTIMATORS.resolve("grop")
    assert "did you mean grpo" in str(caught.value) and "algorithm.estimator" in str(caught.value)
    assert all(name in str(caught.value) for name in ESTIMATORS.entries)
    with pytest.raises(InputError, match="did you mean vanilla"):
        POLICY_LOSSES.resolve("vanila")
    with pytest.raises(InputError, match="use one of these names"):
        POLICY_LOSSES.resolve("zzzzz")


@pytest.mark.parametrize("name", ["absent_module:f", "rl_core.algorithms.kl:absent", "own_algorithms:absent"])
def test_an_import_path_that_leads_nowhere_is_explained(name: str, own: str) -> None:
    with pytest.raises(InputError, match=r"absent(.|\n)*algorithm.estimator=.*:(.|\n)*PYTHONPATH"):
        ESTIMATORS.resolve(name)


def test_an_estimator_of_ones_own_is_a_function_in_a_file(own: str) -> None:
    seen = compute_advantages(batch(), run_config(algorithm={"estimator": f"{own}:half"}))
    assert seen.batch["advantages"].tolist() == [[1.0, 1.0, 0.0], [0.5, 0.0, 0.0]]


def test_a_registered_one_gets_what_it_needs_by_either_name(own: str) -> None:
    for name in (f"{own}:discounted", "test_discounted"):
        seen = compute_advantages(batch(), run_config(algorithm={"estimator": name, "gamma": 0.5}))
        assert seen.batch["advantages"].tolist() == [[1.0, 1.0, 0.0], [0.5, 0.0, 0.0]]


def test_a_need_that_nobody_serves_is_explained(own: str) -> None:
    with pytest.raises(InputError, match=r"gamma, greedy_reward_B(.|\n)*needs entropy_BR(.|\n)*estimator=.*:wishful"):
        compute_advantages(batch(), run_config(algorithm={"estimator": f"{own}:wishful"}))
    plain = batch().select(["response_mask", "token_level_rewards", "old_log_probs", "sum_pi_squared", "uid"])
    for name, need in (("gdpo", "named_rewards"), ("remax", "greedy_reward_B"), ("gae", "values_BR")):
        with pytest.raises(InputError, match=f"needs {need}"):
            compute_advantages(plain, run_config(algorithm={"estimator": name}))


def test_a_policy_loss_of_ones_own_keeps_its_aggregation(own: str) -> None:
    config = run_config(actor={"policy_loss": f"{own}:squared", "loss_agg_mode": "token-mean"})
    rows = batch().union(DataProto({"advantages": torch.zeros(2, 3)}))
    log_prob_BR = torch.tensor([[2.0, 1.0, 9.0], [3.0, 9.0, 9.0]])
    loss, _ = policy_loss(config, 3.0, 2.0)((log_prob_BR, torch.zeros(2, 3)), rows)
    assert loss == 4 + 1 + 9


def test_names_do_not_leak_between_registries() -> None:
    registry: Registry[Any] = Registry("thing", "a.b")
    registry.register("mine")(lambda: 1)
    assert registry.resolve("mine").function() == 1 and registry.resolve("mine").needs == ()
    with pytest.raises(InputError, match=r"name of a thing \(mine\)"):
        registry.resolve("grpo")


def test_unset_clip_ranges_follow_the_clip_ratio() -> None:
    def of(**actor: object) -> tuple[float, float]:
        settings = loss_settings(run_config(actor=actor))
        return settings.clip_low, settings.clip_high

    assert of() == (0.2, 0.2)
    assert of(clip_ratio=0.3) == (0.3, 0.3)
    assert of(clip_ratio=0.3, clip_ratio_high=0.4) == (0.3, 0.4)
    assert of(clip_ratio=0.3, clip_ratio_low=1e-4) == (1e-4, 0.3)
