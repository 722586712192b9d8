"""Rollout correction, KL in the reward and advantages of a scored batch; trainer/reward_columns.py adds the scores."""

from rl_core.algorithms.advantages import ESTIMATORS, group_index
from rl_core.algorithms.correction import importance_weights, rejection_mask
from rl_core.algorithms.kl import KLController, kl_estimate
from rl_core.algorithms.masked import masked_mean
from rl_core.config.schema import CorrectionConfig, RunConfig
from rl_core.data.protocol import DataProto, Metrics
from rl_core.errors import InputError
from rl_core.trainer.reward_columns import NAMED


def apply_correction_and_kl(batch: DataProto, config: RunConfig, controller: KLController) -> tuple[DataProto, Metrics]:
    """Applies `apply_rollout_correction`, then `apply_kl`; returns the batch and the metrics of both."""
    batch, metrics = apply_rollout_correction(batch, config.correction)
    batch, kl_metrics = apply_kl(batch, config.algorithm.kl_in_reward_type, controller.coef)
    if config.algorithm.kl_in_reward_coef:
        kl_metrics["kl/coef"] = controller.coef
    return batch, metrics | kl_metrics


def apply_rollout_correction(batch: DataProto, config: CorrectionConfig) -> tuple[DataProto, Metrics]:
    """Corrects for the mismatch between rollout engine and trainer; returns the batch and metrics.

    Reads `old_log_probs`, `rollout_log_probs` and `response_mask` [B, R]. Importance weighting adds `weights` [B, R].
    Rejection zeroes tokens in `response_mask` and stores the original mask as `sampled_mask` [B, R].
    """
    if config.reject == config.weights == "none":
        return batch, {}  # the engine's log-probs may be missing
    tensors, metrics = dict(batch.batch), {}
    old_BR, rollout_BR, mask_BR = (tensors[n] for n in ("old_log_probs", "rollout_log_probs", "response_mask"))
    if config.reject != "none":
        kept_BR = rejection_mask(old_BR, rollout_BR, mask_BR, config.reject, config.reject_bounds)
        metrics["correction/rejected_share"] = 1.0 - (kept_BR.sum() / mask_BR.sum().clamp(min=1)).item()
        tensors["sampled_mask"] = mask_BR
        tensors["response_mask"] = mask_BR = kept_BR
    if config.weights != "none":
        bounded_BR, weights_BR = (
            importance_weights(old_BR, rollout_BR, mask_BR, config.weights, config.weight_bounds, normalise)
            for normalise in (False, config.normalise)
        )
        tensors["weights"] = weights_BR
        metrics["correction/weight_mean"] = masked_mean(weights_BR, mask_BR).item()
        at_bound_BR = (bounded_BR >= config.weight_bounds[1]) | (bounded_BR == 0)
        metrics["correction/bounded_share"] = masked_mean(at_bound_BR.float(), mask_BR).item()
    return DataProto(tensors, batch.non_tensor_batch), metrics


def apply_kl(batch: DataProto, kind: str, coef: float) -> tuple[DataProto, Metrics]:
    """Adds `token_level_rewards` [B, R] = `token_level_shaped` − `coef` · KL to the reference per token.

    Reads `token_level_shaped` and, if `ref_log_prob` exists, `old_log_probs`, `ref_log_prob` and `response_mask`, all
    [B, R]. Without `ref_log_prob` the rewards equal `token_level_shaped`. `kind` is the KL estimator.
    """
    rewards_BR, metrics = batch.batch["token_level_shaped"], {}
    if "ref_log_prob" in batch.batch:
        mask_BR, old_BR, ref_BR = (batch.batch[n] for n in ("response_mask", "old_log_probs", "ref_log_prob"))
        metrics["kl/ref"] = masked_mean(kl_estimate(old_BR, ref_BR, "k3"), mask_BR).item()
        metrics["kl/ref_k1"] = masked_mean(kl_estimate(old_BR, ref_BR, "k1"), mask_BR).item()
        rewards_BR = rewards_BR - coef * kl_estimate(old_BR, ref_BR, kind) * mask_BR
    return batch.union(DataProto({"token_level_rewards": rewards_BR})), metrics


def compute_advantages(batch: DataProto, config: RunConfig) -> DataProto:
    """Adds `advantages` and `returns` [B, R] by the configured estimator.

    Reads `token_level_rewards` and `response_mask` [B, R] and the groups in `uid` [B]; depending on the estimator also
    `values`, `old_log_probs` and `sum_pi_squared` [B, R], `greedy_reward_B` [B] or the `reward_named/…` columns [B].
    Raises InputError if the estimator needs a column that the batch lacks.
    """
    tensors, algorithm = batch.batch, config.algorithm
    entry = ESTIMATORS.resolve(algorithm.estimator)
    weights = dict(pair.split("=") for pair in algorithm.reward_weights)
    named = {name.removeprefix(NAMED): column for name, column in tensors.items() if name.startswith(NAMED)}
    pool = {
        "values_BR": tensors.get("values"),
        "old_log_probs_BR": tensors.get("old_log_probs"),
        "sum_pi_squared_BR": tensors.get("sum_pi_squared"),
        "greedy_reward_B": tensors.get("greedy_reward_B"),
        "named_rewards": named or None,
        "reward_weights": {name: float(weight) for name, weight in weights.items()},
        "gamma": algorithm.gamma,
        "lam": algorithm.lam,
    }
    absent = [name for name in entry.needs if pool.get(name) is None]
    if absent:
        raise InputError(
            f"an estimator that needs only the available inputs: {', '.join(sorted(pool.keys() - absent))}",
            f"an estimator that also needs {', '.join(absent)}",
            f"algorithm.estimator={algorithm.estimator}",
            "choose another estimator; named_rewards need a scorer that returns a dict, values_BR need gae",
        )
    group_B = group_index(list(batch.non_tensor_batch["uid"]))
    advantages_BR, returns_BR = entry.function(
        tensors["token_level_rewards"], tensors["response_mask"], group_B, **{name: pool[name] for name in entry.needs}
    )
    return batch.union(DataProto({"advantages": advantages_BR, "returns": returns_BR}))
