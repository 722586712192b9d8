"""Losses of the training engine (policy, value and supervised), as shares of a mini-batch's total."""

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.algorithms.kl import kl_estimate
from rl_core.algorithms.masked import aggregate_loss
from rl_core.algorithms.policy_losses import (
    POLICY_LOSSES,
    LossSettings,
    Tokens,
    covariance_band,
    highest_covariance,
)
from rl_core.algorithms.value import clipped_value_loss
from rl_core.config.schema import CriticConfig, RunConfig
from rl_core.data.protocol import DataProto
from rl_core.training.engine import LossFunction

LOG_PROB_COLUMNS = ("old_log_probs", "entropy", "sum_pi_squared")
"""Columns [B, R] of the policy's outputs before the first update of a step."""
Outputs = tuple[Tensor, ...]
Shares = dict[str, Tensor]


def loss_settings(config: RunConfig) -> LossSettings:
    """Parameters of the policy losses, from the config."""
    actor = config.actor
    return LossSettings(
        clip_low=actor.clip_ratio_low or actor.clip_ratio,
        clip_high=actor.clip_ratio_high or actor.clip_ratio,
        clip_dual=actor.clip_ratio_c,
        tau_positive=actor.sapo_tau_positive,
        tau_negative=actor.sapo_tau_negative,
        ppo_kl_coef=actor.ppo_kl_coef,
        cov_share=actor.cov_ratio,
        cov_low=actor.clip_cov_low,
        cov_high=actor.clip_cov_high,
        dro_beta=actor.dro_beta,
        weight_cap=actor.dppo_ratio_cap,
    )


def policy_loss(config: RunConfig, tokens: float, sequences: float) -> LossFunction:
    """The configured policy loss with importance weights of the rollout correction, entropy bonus and KL loss.

    `tokens` and `sequences` are the counts of the whole mini-batch over all ranks. Without `old_log_probs` the policy
    itself is the old one, as in the first update of a step.
    """
    actor, settings = config.actor, loss_settings(config)
    entry = POLICY_LOSSES.resolve(actor.policy_loss)
    mode = entry.agg_mode or actor.loss_agg_mode
    scale = actor.loss_scale_factor or float(config.data.max_response_length)

    def loss_function(outputs: Outputs, rows: DataProto) -> tuple[Tensor, Shares]:
        log_prob_BR, entropy_BR = outputs[0], outputs[1]
        tensors = rows.batch
        mask_BR, old_BR = tensors["response_mask"], tensors.get("old_log_probs", log_prob_BR.detach())

        def total(values_BR: Tensor, mode: str = "token-mean") -> Tensor:
            return aggregate_loss(values_BR, mask_BR, mode, tokens, sequences, scale)

        extra = {name: tensors[name] for name in entry.needs}
        token_BR, indicators = entry.function(
            Tokens(log_prob_BR, old_BR, tensors["advantages"], mask_BR), settings, **extra
        )
        if "weights" in tensors:
            token_BR = token_BR * tensors["weights"]
        shares = {
            "pg_loss": total(token_BR, mode),
            "approx_kl": total(kl_estimate(old_BR, log_prob_BR, "k3")),
            "entropy": total(entropy_BR),
            **{name: total(values_BR) for name, values_BR in indicators.items()},
        }
        loss = shares["pg_loss"]
        if actor.entropy_coef:
            loss = loss - actor.entropy_coef * total(entropy_BR, mode)
        if actor.kl_loss_coef:
            kl_BR = kl_estimate(log_prob_BR, tensors["ref_log_prob"], actor.kl_loss_type)
            shares["kl_loss"] = total(kl_BR, mode)
            loss = loss + actor.kl_loss_coef * shares["kl_loss"]
        return loss, shares

    return loss_function


def select_tokens(config: RunConfig, mini: DataProto, log_prob_BR: Tensor, draw: int) -> DataProto:
    """Adds `selected_BR`: 1.0 on the tokens selected by kl_cov or clip_cov over the whole mini-batch and all ranks.

    The selection uses the mini-batch's mean, so it is made before the split into micro-batches and does not depend on
    it. `draw` seeds the random selection and is the same on all ranks.
    """
    trained_BR = mini.batch["response_mask"] > 0
    own = torch.stack([x[trained_BR] for x in (log_prob_BR, mini.batch["old_log_probs"], mini.batch["advantages"])])
    rank, parts = 0, [own]
    if dist.is_initialized():
        rank, parts = dist.get_rank(), parts * dist.get_world_size()
        dist.all_gather_object(parts, own)
    log_prob_N, old_N, advantage_N = torch.cat(parts, dim=1)
    settings = loss_settings(config)
    if config.actor.policy_loss == "kl_cov":
        chosen_N = highest_covariance(log_prob_N, advantage_N, settings)
    else:
        generator = torch.Generator().manual_seed(draw)
        chosen_N = covariance_band(log_prob_N, old_N, advantage_N, settings, generator)
    start = sum(part.shape[1] for part in parts[:rank])
    selected_BR = torch.zeros_like(mini.batch["response_mask"])
    selected_BR[trained_BR] = chosen_N[start : start + own.shape[1]]
    return mini.union(DataProto({"selected_BR": selected_BR}))


def value_loss(config: CriticConfig, tokens: float) -> LossFunction:
    """Clipped value loss, averaged over the mini-batch's tokens."""

    def loss_function(outputs: Outputs, rows: DataProto) -> tuple[Tensor, Shares]:
        (values_BR,) = outputs
        mask_BR, old_BR, returns_BR = (rows.batch[name] for name in ("response_mask", "values", "returns"))
        loss_BR, clipped_BR = clipped_value_loss(values_BR, old_BR, returns_BR, config.cliprange_value)
        loss, value, clip_frac = (
            aggregate_loss(x_BR, mask_BR, "token-mean", tokens, 1) for x_BR in (loss_BR, values_BR, clipped_BR)
        )
        return loss, {"vf_loss": loss, "value": value, "clip_frac": clip_frac}

    return loss_function


def supervised_loss(tokens: float) -> LossFunction:
    """Cross-entropy of the responses, averaged over the batch's tokens."""

    def loss_function(outputs: Outputs, rows: DataProto) -> tuple[Tensor, Shares]:
        log_prob_BR = outputs[0]
        mask_BR = rows.batch["response_mask"]
        return aggregate_loss(-log_prob_BR, mask_BR, "token-mean", tokens, 1), {}

    return loss_function
