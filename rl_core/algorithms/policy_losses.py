"""Policy losses per token [B, R], to be minimised; aggregation over the mini-batch is a separate step.

Every loss takes `Tokens`, `LossSettings` and the tensors named in its registration. It returns the loss per token and
named indicators per token, whose masked means are metrics. Values at masked tokens are undefined and ignored by the
aggregation; an empty mask gives 0. The log-ratio is clamped to ±20, so no exponent overflows; a non-finite log-prob
gives a non-finite loss, and the engine skips that update.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rl_core.algorithms.registry import Registry

TokenLoss = tuple[Tensor, dict[str, Tensor]]


class Tokens(NamedTuple):
    """Log-probs of the current policy and of π_old (the rollout policy), advantages and mask, each [B, R]."""

    log_prob_BR: Tensor
    old_BR: Tensor
    advantage_BR: Tensor
    mask_BR: Tensor

    @property
    def log_ratio_BR(self) -> Tensor:
        """log π − log π_old clamped to ±20."""
        return log_ratio(self.log_prob_BR, self.old_BR)


@dataclass(frozen=True)
class LossSettings:
    """Parameters of the policy losses; each loss's docstring names the ones it uses."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float = 3.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    ppo_kl_coef: float = 0.1
    cov_share: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    dro_beta: float = 0.1
    weight_cap: float = 20.0


POLICY_LOSSES: Registry[Callable[..., TokenLoss]] = Registry("policy loss", "actor.policy_loss")


def log_ratio(log_prob_BR: Tensor, old_BR: Tensor) -> Tensor:
    """log π − log π_old clamped to ±20."""
    return (log_prob_BR - old_BR).clamp(-20, 20)


def sequence_mean(values_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Mean over each row's tokens [B, 1]; 0 for a row without tokens."""
    return (values_BR * mask_BR).sum(-1, keepdim=True) / mask_BR.sum(-1, keepdim=True).clamp(min=1)


def _clipped(ratio_BR: Tensor, advantage_BR: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Maximum of unclipped and clipped surrogate loss, and 1.0 where the clipped one is larger."""
    unclipped_BR = -advantage_BR * ratio_BR
    clipped_BR = -advantage_BR * ratio_BR.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return torch.maximum(unclipped_BR, clipped_BR), (clipped_BR > unclipped_BR).float()


@POLICY_LOSSES.register("vanilla")
def vanilla(t: Tokens, settings: LossSettings) -> TokenLoss:
    """PPO's clipped surrogate, limited to −A·clip_dual where the advantage is negative.

    Sources: arXiv 1707.06347, equation 7; dual clip arXiv 1912.09729, equation 5.
    """
    loss_BR, clipped_BR = _clipped(t.log_ratio_BR.exp(), t.advantage_BR, settings)
    bound_BR = -t.advantage_BR * settings.clip_dual
    negative_BR = t.advantage_BR < 0
    bounded_BR = torch.where(negative_BR, torch.minimum(loss_BR, bound_BR), loss_BR)
    return bounded_BR, {"clip_frac": clipped_BR, "dual_clip_frac": (negative_BR & (loss_BR > bound_BR)).float()}


@POLICY_LOSSES.register("gspo", agg_mode="seq-mean-token-mean")
def gspo(t: Tokens, settings: LossSettings) -> TokenLoss:
    """Clipped surrogate with the sequence ratio exp(mean log-ratio) on every token. Source: arXiv 2507.18071.

    The gradient flows through each token's own log-prob; the exponent is limited to 10.
    """
    mean_B1 = sequence_mean(t.log_prob_BR - t.old_BR, t.mask_BR)
    exponent_BR = t.log_prob_BR - t.log_prob_BR.detach() + mean_B1.detach()
    loss_BR, clipped_BR = _clipped(exponent_BR.clamp(max=10).exp(), t.advantage_BR, settings)
    return loss_BR, {"clip_frac": clipped_BR}


@POLICY_LOSSES.register("cispo")
def cispo(t: Tokens, settings: LossSettings) -> TokenLoss:
    """−sg(clipped ratio) · A · log π: clipped tokens keep their gradient. Source: arXiv 2506.13585, equation 4."""
    ratio_BR = t.log_ratio_BR.exp().detach()
    clipped_BR = ratio_BR.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -clipped_BR * t.advantage_BR * t.log_prob_BR, {"clip_frac": (clipped_BR != ratio_BR).float()}


@POLICY_LOSSES.register("sapo", agg_mode="seq-mean-token-mean")
def sapo(t: Tokens, settings: LossSettings) -> TokenLoss:
    """−(4/τ)·σ(τ(ratio − 1))·A, a soft gate instead of a clip. Source: arXiv 2511.20347.

    τ is `tau_positive` for positive advantages and `tau_negative` otherwise.
    """
    ratio_BR = t.log_ratio_BR.exp()
    tau_BR = torch.where(t.advantage_BR > 0, settings.tau_positive, settings.tau_negative)
    return -(4 / tau_BR) * torch.sigmoid(tau_BR * (ratio_BR - 1)) * t.advantage_BR, {}


@POLICY_LOSSES.register("gpg")
def gpg(t: Tokens, settings: LossSettings) -> TokenLoss:
    """−A · log π, the plain policy gradient. Source: arXiv 2504.02546."""
    return -t.advantage_BR * t.log_prob_BR, {}


@POLICY_LOSSES.register("kl_cov", needs=("selected_BR",))
def kl_cov(t: Tokens, settings: LossSettings, selected_BR: Tensor) -> TokenLoss:
    """−A·ratio, plus ppo_kl_coef·|log-ratio| on the tokens of highest covariance. Source: arXiv 2505.22617.

    `selected_BR` marks these tokens; `highest_covariance` selects them over the whole mini-batch.
    """
    lr_BR = t.log_ratio_BR
    loss_BR = -t.advantage_BR * lr_BR.exp()
    return loss_BR + selected_BR * settings.ppo_kl_coef * lr_BR.abs(), {"cov_frac": selected_BR}


@POLICY_LOSSES.register("clip_cov", needs=("selected_BR",))
def clip_cov(t: Tokens, settings: LossSettings, selected_BR: Tensor) -> TokenLoss:
    """Clipped surrogate in which randomly selected tokens of high covariance get no gradient. Source: arXiv 2505.22617.

    `selected_BR` marks these tokens; `covariance_band` samples them over the whole mini-batch.
    """
    loss_BR, clipped_BR = _clipped(t.log_ratio_BR.exp(), t.advantage_BR, settings)
    return loss_BR * (1 - selected_BR), {"clip_frac": clipped_BR, "cov_frac": selected_BR}


@POLICY_LOSSES.register("geo_mean", agg_mode="seq-mean-token-mean")
def geo_mean(t: Tokens, settings: LossSettings) -> TokenLoss:
    """Geometric-mean ratio of a sequence with log-ratios clipped on one side (GMPO). Source: arXiv 2507.20673.

    d = sign(A)·min(sign(A)·log-ratio, ε); the loss of a sequence is −mean(A)·exp(mean d) on each of its tokens. It is
    averaged over the sequences of the whole mini-batch, so the gradient does not depend on the split.
    """
    sign_BR = torch.sign(t.advantage_BR)
    bound_BR = torch.where(t.advantage_BR > 0, settings.clip_high, settings.clip_low)
    lr_BR = t.log_ratio_BR
    clipped_BR = sign_BR * torch.minimum(sign_BR * lr_BR, bound_BR)
    ratio_B1 = sequence_mean(clipped_BR, t.mask_BR).exp()
    loss_BR = (-sequence_mean(t.advantage_BR, t.mask_BR) * ratio_B1).expand_as(t.log_prob_BR)
    return loss_BR, {"clip_frac": (clipped_BR != lr_BR).float() * (sign_BR != 0)}


def _trust_region(t: Tokens, distance_BR: Tensor, settings: LossSettings) -> TokenLoss:
    """−A·sg(min(ratio, cap))·log π, with 0 for tokens outside the trust region that would move further away."""
    change_BR = (t.log_prob_BR - t.old_BR).detach()
    up_BR = (t.advantage_BR > 0) & (change_BR > 0) & (distance_BR > settings.clip_high)
    down_BR = (t.advantage_BR < 0) & (change_BR < 0) & (distance_BR > settings.clip_low)
    kept_BR = (~(up_BR | down_BR)).float()
    weight_BR = t.log_ratio_BR.exp().detach().clamp(max=settings.weight_cap)
    return -t.advantage_BR * weight_BR * t.log_prob_BR * kept_BR, {"clip_frac": 1 - kept_BR}


@POLICY_LOSSES.register("dppo_tv")
def dppo_tv(t: Tokens, settings: LossSettings) -> TokenLoss:
    """Trust region on the total variation |π − π_old| of the sampled token. Source: arXiv 2602.04879."""
    distance_BR = (t.log_prob_BR.exp() - t.old_BR.exp()).abs().detach()
    return _trust_region(t, distance_BR, settings)


@POLICY_LOSSES.register("dppo_kl")
def dppo_kl(t: Tokens, settings: LossSettings) -> TokenLoss:
    """Trust region on the KL of the binary distribution {sampled token, all others}. Source: arXiv 2602.04879."""
    new_BR, old_BR = (x.detach().exp().clamp(1e-8, 1 - 1e-8) for x in (t.log_prob_BR, t.old_BR))
    distance_BR = old_BR * (old_BR / new_BR).log() + (1 - old_BR) * ((1 - old_BR) / (1 - new_BR)).log()
    return _trust_region(t, distance_BR, settings)


@POLICY_LOSSES.register("dro")
def dro(t: Tokens, settings: LossSettings) -> TokenLoss:
    """−(A·log π − β/2·log-ratio²), with a quadratic penalty on the log-ratio. Source: arXiv 2405.19107."""
    return -(t.advantage_BR * t.log_prob_BR - settings.dro_beta / 2 * (t.log_prob_BR - t.old_BR).square()), {}


def covariance(log_prob_N: Tensor, advantage_N: Tensor) -> Tensor:
    """(A − mean A)(log π − mean log π) of the trained tokens [N] of a mini-batch."""
    return (advantage_N - advantage_N.mean()) * (log_prob_N - log_prob_N.mean())


def highest_covariance(log_prob_N: Tensor, advantage_N: Tensor, settings: LossSettings) -> Tensor:
    """1.0 on the `cov_share` of the tokens [N] with the highest covariance, at least one token; empty if N = 0."""
    chosen_N = torch.zeros_like(log_prob_N)
    if len(log_prob_N):
        count = max(1, int(settings.cov_share * len(log_prob_N)))
        chosen_N[covariance(log_prob_N, advantage_N).topk(count).indices] = 1.0
    return chosen_N


def covariance_band(
    log_prob_N: Tensor, old_N: Tensor, advantage_N: Tensor, settings: LossSettings, generator: torch.Generator
) -> Tensor:
    """1.0 on up to `cov_share` of the tokens [N], sampled from unclipped ones with covariance in (cov_low, cov_high).

    At least one token is sampled if there is any.
    """
    ratio_N = log_ratio(log_prob_N, old_N).exp()
    _, clipped_N = _clipped(ratio_N, advantage_N, settings)
    cov_N = covariance(log_prob_N, advantage_N) if len(log_prob_N) else log_prob_N
    band = ((cov_N > settings.cov_low) & (cov_N < settings.cov_high) & (clipped_N == 0)).nonzero().flatten()
    count = min(len(band), max(1, int(settings.cov_share * len(log_prob_N))))
    chosen_N = torch.zeros_like(log_prob_N)
    chosen_N[band[torch.randperm(len(band), generator=generator)[:count]]] = 1.0
    return chosen_N
