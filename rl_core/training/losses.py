"""The losses that a training engine minimises: policy, value and supervised, as shares of a mini-batch's total."""

from torch import Tensor

from rl_core.algorithms.kl import kl_estimate
from rl_core.algorithms.masked import aggregate_loss
from rl_core.algorithms.policy_losses import ppo_clip
from rl_core.algorithms.value import clipped_value_loss
from rl_core.config.schema import ActorConfig, CriticConfig
from rl_core.data.protocol import DataProto
from rl_core.training.engine import LossFunction

Outputs = tuple[Tensor, ...]
Shares = dict[str, Tensor]


def policy_loss(config: ActorConfig, tokens: float, sequences: float) -> LossFunction:
    """Clipped policy loss with entropy bonus and KL loss; `tokens` and `sequences` count the whole mini-batch."""
    low, high = config.clip_ratio_low or config.clip_ratio, config.clip_ratio_high or config.clip_ratio

    def loss_function(outputs: Outputs, rows: DataProto) -> tuple[Tensor, Shares]:
        log_prob_BR, entropy_BR = outputs
        on = {name: rows.batch[name].to(log_prob_BR.device) for name in _POLICY_FIELDS if name in rows.batch}
        mask_BR, old_BR = on["response_mask"], on["old_log_probs"]

        def total(values_BR: Tensor, mode: str = "token-mean") -> Tensor:
            return aggregate_loss(values_BR, mask_BR, mode, tokens, sequences)

        per_token_BR, clipped_BR, dual_BR = ppo_clip(
            log_prob_BR, old_BR, on["advantages"], low, high, config.clip_ratio_c
        )
        policy = total(per_token_BR, config.loss_agg_mode)
        shares = {
            "pg_loss": policy,
            "clip_frac": total(clipped_BR),
            "dual_clip_frac": total(dual_BR),
            "approx_kl": total(kl_estimate(old_BR, log_prob_BR, "k3")),
            "entropy": total(entropy_BR),
        }
        loss = policy
        if config.entropy_coef:
            loss = loss - config.entropy_coef * total(entropy_BR, config.loss_agg_mode)
        if config.kl_loss_coef:
            kl_BR = kl_estimate(log_prob_BR, on["ref_log_prob"], config.kl_loss_type)
            shares["kl_loss"] = total(kl_BR, config.loss_agg_mode)
            loss = loss + config.kl_loss_coef * shares["kl_loss"]
        return loss, shares

    return loss_function


def value_loss(config: CriticConfig, tokens: float) -> LossFunction:
    """Clipped value loss, averaged over the mini-batch's tokens."""

    def loss_function(outputs: Outputs, rows: DataProto) -> tuple[Tensor, Shares]:
        (values_BR,) = outputs
        mask_BR, old_BR, returns_BR = (
            rows.batch[name].to(values_BR.device) for name in ("response_mask", "values", "returns")
        )
        loss_BR = clipped_value_loss(values_BR, old_BR, returns_BR, config.cliprange_value)
        loss = aggregate_loss(loss_BR, mask_BR, "token-mean", tokens, 1)
        return loss, {"vf_loss": loss, "value": aggregate_loss(values_BR, mask_BR, "token-mean", tokens, 1)}

    return loss_function


def supervised_loss(tokens: float) -> LossFunction:
    """Cross-entropy of the responses, averaged over the batch's tokens."""

    def loss_function(outputs: Outputs, rows: DataProto) -> tuple[Tensor, Shares]:
        log_prob_BR = outputs[0]
        return aggregate_loss(
            -log_prob_BR, rows.batch["response_mask"].to(log_prob_BR.device), "token-mean", tokens, 1
        ), {}

    return loss_function


_POLICY_FIELDS = ("response_mask", "old_log_probs", "advantages", "ref_log_prob")
