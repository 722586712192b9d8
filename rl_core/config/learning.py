"""Settings of the learning algorithm: optimizers, losses, advantages and off-policy corrections."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

KLType = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]
GROUP_ESTIMATORS = (
    "grpo", "dr_grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "optimal_token_baseline",
    "gdpo",
)  # fmt: skip

MAX_COUNT = 10**9
"""Largest number of steps, rows or tokens."""
MAX_PROCESSES = 1024
"""Largest number of processes or threads on one machine."""
MAX_SECONDS = 1e8
"""Longest time, about three years: the timers of some libraries overflow beyond it."""
MAX_VALUE = 1e12
"""Largest score, weight or bound."""


@dataclass(frozen=True)
class Trusted:
    """Mark of a setting whose values may name code, a command or a receiver of secrets, or end a protection
    (rl_core/config/trust.py)."""

    pattern: str
    """Regular expression found in such values only."""

    def covers(self, value: Any) -> bool:
        """Whether the value, or an entry of a list, is such a value."""
        entries = value if isinstance(value, list) else [value]
        return any(isinstance(entry, str) and re.search(self.pattern, entry) for entry in entries)


CODE = Trusted(":")
"""`package.module:name` is imported; names without a colon are those of the library."""
ALWAYS = Trusted("")
"""Any value: a command line, a server, or a variable whose value is sent."""


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are immutable after parsing."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


Beta = Annotated[float, Field(ge=0, lt=1)]
Ratio = Annotated[float, Field(ge=0, le=MAX_VALUE)]


class OptimConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(1e-6, gt=0, le=10.0)
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up; linear and cosine decay to 0 after the last step."""
    warmup_steps: int = Field(0, ge=0, le=MAX_COUNT)
    """Optimizer steps of linear warm-up."""
    weight_decay: float = Field(0.0, ge=0, le=MAX_VALUE)
    """Decoupled weight decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's moment coefficients."""
    grad_clip: float = Field(1.0, gt=0, le=MAX_VALUE)
    """Maximum global L2 norm of the gradient."""
    max_skipped_updates: int = Field(3, ge=0, le=MAX_COUNT)
    """Consecutive optimizer steps that may be skipped because of a non-finite gradient; one more stops training."""


class CriticOptimConfig(OptimConfig):
    """AdamW of the value model."""

    lr: float = Field(1e-5, gt=0, le=10.0)
    """Peak learning rate."""


class ActorConfig(Section):
    """Training of the policy."""

    optim: OptimConfig = OptimConfig()
    """Optimizer of the policy."""
    mini_batch_size: int | None = Field(None, ge=1, le=MAX_COUNT)
    """Prompts per optimizer step; unset: the whole batch of the step."""
    ppo_epochs: int = Field(1, ge=1, le=MAX_COUNT)
    """Passes over the batch of a step."""
    max_tokens_per_micro_batch: int = Field(8192, ge=1, le=MAX_COUNT)
    """Packed tokens (prompt and response) per micro-batch and rank; affects memory, not the result."""
    clip_ratio: float = Field(0.2, gt=0, le=MAX_VALUE)
    """PPO clipping range; default of `clip_ratio_low` and `clip_ratio_high`."""
    clip_ratio_low: float | None = Field(None, gt=0, le=MAX_VALUE)
    """Lower clipping range; unset: `clip_ratio`."""
    clip_ratio_high: float | None = Field(None, gt=0, le=MAX_VALUE)
    """Upper clipping range (DAPO's clip-higher); unset: `clip_ratio`."""
    clip_ratio_c: float = Field(3.0, gt=1, le=MAX_VALUE)
    """Dual-clip bound on the ratio of tokens with negative advantage."""
    policy_loss: Annotated[str, CODE] = "vanilla"
    """Name of a policy loss (docs/algorithms.md) or a custom `package.module:function`."""
    loss_agg_mode: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
    ] = "token-mean"
    """Reduction of per-token losses; counts are taken over the whole mini-batch across all ranks. Losses defined on
    sequences (gspo, sapo, geo_mean) always use `seq-mean-token-mean`."""
    loss_scale_factor: float | None = Field(None, gt=0, le=MAX_VALUE)
    """Divisor of `seq-mean-token-sum-norm`; unset: `data.max_response_length`."""
    sapo_tau_positive: float = Field(1.0, gt=0, le=MAX_VALUE)
    """Steepness of SAPO's gate for positive advantages."""
    sapo_tau_negative: float = Field(1.05, gt=0, le=MAX_VALUE)
    """Steepness of SAPO's gate for other advantages."""
    cov_ratio: float = Field(2e-4, gt=0, le=1)
    """Share of a mini-batch's tokens that kl_cov and clip_cov select (at least one token)."""
    clip_cov_low: float = Field(1.0, ge=-MAX_VALUE, le=MAX_VALUE)
    """Covariance above which clip_cov may select a token."""
    clip_cov_high: float = Field(5.0, ge=-MAX_VALUE, le=MAX_VALUE)
    """Covariance below which clip_cov may select a token."""
    ppo_kl_coef: float = Field(0.1, ge=0, le=MAX_VALUE)
    """Weight of |log-ratio| on the tokens that kl_cov selects."""
    dro_beta: float = Field(0.1, ge=0, le=MAX_VALUE)
    """Weight of the squared log-ratio in dro."""
    dppo_ratio_cap: float = Field(20.0, gt=1, le=MAX_VALUE)
    """Cap on the ratio that weights a token in dppo_tv and dppo_kl."""
    entropy_coef: float = Field(0.0, ge=0, le=MAX_VALUE)
    """Weight of the entropy bonus."""
    kl_loss_coef: float = Field(0.0, ge=0, le=MAX_VALUE)
    """Weight of the KL loss against the reference model, which is loaded if this is above 0."""
    kl_loss_type: KLType = "k3"
    """Estimator of the KL in the loss; a trailing `+` uses the gradient of k2."""


class CriticConfig(Section):
    """Training of the value model."""

    optim: CriticOptimConfig = CriticOptimConfig()
    """Optimizer of the value model."""
    ppo_epochs: int = Field(1, ge=1, le=MAX_COUNT)
    """Passes over the batch of a step."""
    cliprange_value: float = Field(0.5, gt=0, le=MAX_VALUE)
    """Clipping range of a value around its prediction before the update."""


class AlgorithmConfig(Section):
    """Computation of advantages from rewards."""

    estimator: Annotated[str, CODE] = "grpo"
    """Name of an advantage estimator (docs/algorithms.md) or a custom `package.module:function`; gae trains a
    critic."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(1.0, ge=0, le=1)
    """GAE's lambda."""
    reward_weights: tuple[str, ...] = ()
    """Weights of the named rewards for gdpo, as `name=weight`; the default weight is 1."""
    kl_in_reward_coef: float = Field(0.0, ge=0, le=MAX_VALUE)
    """Weight of the per-token KL subtracted from the reward; above 0 a reference model is loaded."""
    kl_in_reward_type: KLType = "k1"
    """Estimator of the KL in the reward."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """Controller of the weight of the KL in the reward; adaptive moves it to reach `kl_target`."""
    kl_target: float = Field(0.1, gt=0, le=MAX_VALUE)
    """Target KL per token of the adaptive controller."""
    kl_horizon: float = Field(10_000.0, gt=0, le=MAX_VALUE)
    """Responses over which the adaptive controller reacts."""
    allow_both_kl: bool = False
    """Allow KL in the loss and in the reward at the same time."""
    overlong_buffer: int = Field(0, ge=0, le=MAX_COUNT)
    """Tokens before the response limit over which the reward is reduced (DAPO); 0 disables the penalty."""
    overlong_penalty: float = Field(1.0, ge=0, le=MAX_VALUE)
    """Reward subtracted from a response of full length."""
    max_generated_batches: int = Field(0, ge=0, le=MAX_COUNT)
    """Dynamic sampling: drop groups whose scores are all equal and refill the batch, with at most this many generated
    batches per step; 0 keeps all groups."""
    when_too_few_groups: Literal["fill", "stop"] = "fill"
    """At that limit: fill the batch with groups of equal scores, which contribute no gradient, or stop the run."""
    pf_ppo: Literal["none", "pow", "max_min", "max_random"] = "none"
    """Policy-filtered PPO: resample the step's responses with probabilities derived from their scores."""
    pf_ppo_power: float = Field(1.0, ge=0, le=MAX_VALUE)
    """Exponent of `pf_ppo=pow`."""


class CorrectionConfig(Section):
    """Correction of log-prob differences between rollout engine and trainer."""

    weights: Literal["none", "token", "sequence"] = "none"
    """Importance weights π_old / π_rollout on the loss, per token or per sequence."""
    weight_bounds: tuple[Ratio, Ratio] = (0.0, 2.0)
    """Bounds of the weights. A lower bound of 0 truncates at the upper bound; above 0, weights out of bounds become 0
    (IcePop)."""
    normalise: bool = False
    """Divide weights by their mean."""
    reject: Literal["none", "token", "sequence_mean", "sequence_sum", "sequence_max"] = "none"
    """What to mask from the loss if its ratio is out of bounds: tokens, or sequences by a statistic of their
    log-ratios."""
    reject_bounds: tuple[Ratio, Ratio] = (0.5, 2.0)
    """Range of accepted ratios."""
