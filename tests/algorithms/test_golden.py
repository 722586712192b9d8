"""The formulas against values of the field's reference implementation, or computed by hand, for the same inputs.

Values are compared where the mask is 1: elsewhere this library gives 0, the reference not always.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from rl_core.algorithms.advantages import ESTIMATORS, group_index
from rl_core.algorithms.correction import importance_weights
from rl_core.algorithms.kl import kl_estimate
from rl_core.algorithms.masked import aggregate_loss, masked_mean
from rl_core.algorithms.policy_losses import POLICY_LOSSES, LossSettings, Tokens, highest_covariance
from rl_core.config.learning import KLType
from rl_core.config.schema import ActorConfig, CriticConfig, RunConfig
from rl_core.data.protocol import DataProto
from rl_core.training.losses import loss_settings, value_loss

GOLDEN = Path(__file__).parents[1] / "golden"
# Names of the reference's settings and inputs that are called otherwise here.
SETTINGS = {"kl_cov_ratio": "cov_ratio"}
NEEDS = {
    "values_BR": "values",
    "greedy_reward_B": "reward_baselines",
    "old_log_probs_BR": "old_log_probs",
    "sum_pi_squared_BR": "sum_pi_squared",
    "gamma": "gamma",
    "lam": "lam",
}


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((GOLDEN / f"{name}.json").read_text())
    return found


def cases(name: str, *keys: str) -> list[Any]:
    """Every case of a file, named by the given keys."""
    return [
        pytest.param(row, id="-".join([*(str(row[key]) for key in keys), row["mask"], str(i)]))
        for i, row in enumerate(rows(name))
    ]


def tensors(case: dict[str, Any]) -> dict[str, Tensor]:
    return {k: torch.tensor(v) for k, v in case["inputs"].items() if isinstance(v, list) and k != "uid"}


def close(seen: Tensor, wanted: object, mask_BR: Tensor | None = None) -> None:
    expected = torch.tensor(wanted)
    if mask_BR is not None:
        assert not seen[mask_BR == 0].any()
        expected = expected * mask_BR
    torch.testing.assert_close(seen, expected, atol=1e-5, rtol=1e-4)


def test_the_files_hold_what_they_should() -> None:
    assert {row["estimator"] for row in rows("advantage")} == set(ESTIMATORS.entries) - {"gdpo"}
    losses = {row["loss"] for row in rows("policy_loss")} - {"vanilla_asym"}
    assert losses | BY_HAND["policy_loss"].keys() == set(POLICY_LOSSES.entries)
    assert BY_HAND["kl"].keys() == set(get_args(KLType))
    assert len({row["mode"] for row in rows("aggregate")}) == 5 and len({row["estimator"] for row in rows("kl")}) == 7


@pytest.mark.parametrize("case", cases("advantage", "estimator"))
def test_advantages(case: dict[str, Any]) -> None:
    x, entry = tensors(case), ESTIMATORS.resolve(case["estimator"])
    given = {**case["inputs"], **x}
    needed = {name: given[NEEDS[name]] for name in entry.needs}
    group_B = group_index(case["inputs"]["uid"])
    advantages_BR, returns_BR = entry.function(x["token_level_rewards"], x["response_mask"], group_B, **needed)
    close(advantages_BR, case["advantages"], x["response_mask"])
    close(returns_BR, case["returns"], x["response_mask"])


def policy_case(case: dict[str, Any]) -> tuple[Tokens, LossSettings, dict[str, Tensor], str]:
    """Inputs of a policy loss: its tokens, settings from the config, what it needs, and its name."""
    x, name = tensors(case), case["loss"].removesuffix("_asym")
    actor = {SETTINGS.get(key, key): value for key, value in case["settings"].items()}
    settings = loss_settings(RunConfig(actor=ActorConfig(**actor)))
    tokens = Tokens(x["log_prob"].requires_grad_(), x["old_log_prob"], x["advantages"], x["response_mask"])
    needed = {}
    if POLICY_LOSSES.resolve(name).needs:
        on = tokens.mask_BR > 0
        needed["selected_BR"] = torch.zeros_like(tokens.mask_BR)
        needed["selected_BR"][on] = highest_covariance(
            tokens.log_prob_BR.detach()[on], tokens.advantage_BR[on], settings
        )
    return tokens, settings, needed, name


@pytest.mark.parametrize("case", cases("policy_loss", "loss"))
def test_policy_loss_and_gradient(case: dict[str, Any]) -> None:
    t, settings, needed, name = policy_case(case)
    entry = POLICY_LOSSES.resolve(name)
    loss_BR, _ = entry.function(t, settings, **needed)
    mode = entry.agg_mode or case["aggregation"]
    value = aggregate_loss(loss_BR, t.mask_BR, mode, float(t.mask_BR.sum()), len(t.mask_BR))
    value.backward()
    close(value.detach(), case["value"])
    assert t.log_prob_BR.grad is not None
    close(t.log_prob_BR.grad, case["grad_log_prob"], t.mask_BR)


CLIPPED = [
    case for case in cases("policy_loss", "loss") if case.values[0]["loss"] in ("vanilla", "vanilla_asym", "gspo")
]


@pytest.mark.parametrize("case", CLIPPED)
def test_clip_fractions(case: dict[str, Any]) -> None:
    t, settings, needed, name = policy_case(case)
    _, indicators = POLICY_LOSSES.resolve(name).function(t, settings, **needed)
    close(masked_mean(indicators["clip_frac"], t.mask_BR), case["metrics"]["actor/pg_clipfrac"])
    if name == "vanilla":
        close(masked_mean(indicators["dual_clip_frac"], t.mask_BR), case["metrics"]["actor/pg_clipfrac_lower"])


@pytest.mark.parametrize("case", cases("kl", "estimator"))
def test_kl(case: dict[str, Any]) -> None:
    x = tensors(case)
    kind = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(case["estimator"], case["estimator"])
    close(kl_estimate(x["log_prob"], x["ref_log_prob"], kind), case["kl"])


@pytest.mark.parametrize("case", cases("value_loss"))
def test_value_loss_and_clip_fraction(case: dict[str, Any]) -> None:
    x = tensors(case)
    config = CriticConfig(cliprange_value=case["inputs"]["cliprange_value"])
    batch = DataProto({name: x[name] for name in ("response_mask", "values", "returns")})
    loss, shares = value_loss(config, float(x["response_mask"].sum()))((x["vpreds"],), batch)
    close(loss, case["loss"])
    close(shares["clip_frac"], case["clipfrac"])


@pytest.mark.parametrize("case", cases("aggregate", "mode"))
def test_aggregation(case: dict[str, Any]) -> None:
    x, given = tensors(case), case["inputs"]
    seen = aggregate_loss(
        x["loss"],
        x["response_mask"],
        case["mode"],
        given["batch_num_tokens"],
        given["global_batch_size"],
        given.get("loss_scale_factor", 1.0),
    )
    close(seen, case["value"])


@pytest.mark.parametrize("case", cases("rollout_correction", "level", "threshold"))
def test_importance_weights(case: dict[str, Any]) -> None:
    x, threshold = tensors(case), case["threshold"]
    low, high = map(float, threshold.split("_")) if isinstance(threshold, str) else (0.0, threshold)
    mask_BR = x["response_mask"]
    weights_BR = importance_weights(x["old_log_prob"], x["rollout_log_prob"], mask_BR, case["level"], (low, high))
    close(weights_BR, case["weights"], mask_BR)


# What the reference implementation does not give: values in double precision by tests/golden/by_hand.py.
BY_HAND: dict[str, Any] = json.loads((GOLDEN / "by_hand.json").read_text())


def test_the_values_by_hand_are_those_of_their_program() -> None:
    done = subprocess.run([sys.executable, GOLDEN / "by_hand.py"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == BY_HAND


@pytest.mark.parametrize("kind", BY_HAND["kl"])
def test_kl_values_and_gradients(kind: str) -> None:
    x, wanted = tensors(BY_HAND), BY_HAND["kl"][kind]
    log_prob_BR = x["log_prob"].requires_grad_()
    estimate_BR = kl_estimate(log_prob_BR, x["ref_log_prob"], kind)
    estimate_BR.sum().backward()
    close(estimate_BR.detach(), wanted["value"])
    assert log_prob_BR.grad is not None and not x["ref_log_prob"].requires_grad
    close(log_prob_BR.grad, wanted["grad_log_prob"])


@pytest.mark.parametrize("name", BY_HAND["policy_loss"])
def test_losses_and_gradients_by_hand(name: str) -> None:
    x, wanted = tensors(BY_HAND), BY_HAND["policy_loss"][name]
    log_prob_BR = x["log_prob"].requires_grad_()
    needed = {"selected_BR": x["selected"]} if POLICY_LOSSES.resolve(name).needs else {}
    tokens = Tokens(log_prob_BR, x["old_log_prob"], x["advantages"], x["response_mask"])
    loss_BR, _ = POLICY_LOSSES.resolve(name).function(tokens, LossSettings(**BY_HAND["settings"]), **needed)
    loss_BR.sum().backward()
    close(loss_BR.detach(), wanted["value"])
    assert log_prob_BR.grad is not None
    close(log_prob_BR.grad, wanted["grad_log_prob"])


def test_gdpo_by_hand() -> None:
    x, given = tensors(BY_HAND), BY_HAND["inputs"]
    mask_BR, named = x["response_mask"], {name: torch.tensor(row).float() for name, row in given["named"].items()}
    function = ESTIMATORS.resolve("gdpo").function
    advantages_BR, returns_BR = function(
        torch.zeros_like(mask_BR), mask_BR, group_index(given["uid"]), named, given["reward_weights"]
    )
    close(advantages_BR, BY_HAND["gdpo"], mask_BR)
    close(returns_BR, BY_HAND["gdpo"], mask_BR)
