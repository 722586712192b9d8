"""The settings of the learning itself: optimizers, losses, advantages and their corrections."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

KLType = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]
GROUP_ESTIMATORS = (
    "grpo", "dr_grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "optimal_token_baseline",
    "gdpo",
)  # fmt: skip


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values never change after parsing."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class OptimConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine reach 0 after the last step."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment coefficients."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest global L2 norm of the gradient."""
    max_skipped_updates: int = Field(3, ge=0)
    """Optimizer steps in a row that may be left out because their gradient is not finite; one more stops training."""


class ActorConfig(Section):
    """Training of the policy."""

    optim: OptimConfig = OptimConfig()
    """Optimizer of the policy."""
    mini_batch_size: int | None = Field(None, ge=1)
    """Prompts per optimizer step; unset takes the whole batch of the step at once."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over the batch of a step."""
    max_tokens_per_micro_batch: int = Field(8192, ge=1)
    """Packed tokens (prompt and response) that one rank computes at a time; changes memory, never the result."""
    clip_ratio: float = Field(0.2, gt=0)
    """PPO clipping range; `clip_ratio_low` and `clip_ratio_high` follow it when unset."""
    clip_ratio_low: float | None = Field(None, gt=0)
    """Lower clipping range."""
    clip_ratio_high: float | None = Field(None, gt=0)
    """Upper clipping range (DAPO's clip-higher)."""
    clip_ratio_c: float = Field(3.0, gt=1)
    """Dual-clip bound on the ratio of tokens with negative advantage."""
    policy_loss: str = "vanilla"
    """Name of a policy loss (docs/algorithms.md) or `package.module:function` of your own."""
    loss_agg_mode: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
    ] = "token-mean"
    """How per-token losses become one number; counts are those of the whole mini-batch over all ranks. Losses that are
    defined on sequences (gspo, sapo, geo_mean) always take `seq-mean-token-mean`."""
    loss_scale_factor: float | None = Field(None, gt=0)
    """Divisor of `seq-mean-token-sum-norm`; unset takes data.max_response_length."""
    sapo_tau_positive: float = Field(1.0, gt=0)
    """Steepness of SAPO's gate for positive advantages."""
    sapo_tau_negative: float = Field(1.05, gt=0)
    """Steepness of SAPO's gate for other advantages."""
    cov_ratio: float = Field(2e-4, gt=0, le=1)
    """Share of a mini-batch's tokens that kl_cov and clip_cov choose, at least one token."""
    clip_cov_low: float = 1.0
    """Covariance above which clip_cov may choose a token."""
    clip_cov_high: float = 5.0
    """Covariance below which clip_cov may choose a token."""
    ppo_kl_coef: float = Field(0.1, ge=0)
    """Weight of |log-ratio| on the tokens that kl_cov chooses."""
    dro_beta: float = Field(0.1, ge=0)
    """Weight of the squared log-ratio in dro."""
    dppo_ratio_cap: float = Field(20.0, gt=1)
    """Largest ratio that weighs a token in dppo_tv and dppo_kl."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    kl_loss_coef: float = Field(0.0, ge=0)
    """Weight of the KL loss against the reference model; above 0 a reference model is loaded."""
    kl_loss_type: KLType = "k3"
    """Estimator of the KL in the loss; with a `+` its gradient is that of k2."""


class CriticConfig(Section):
    """Training of the value model."""

    optim: OptimConfig = OptimConfig(lr=1e-5)
    """Optimizer of the value model."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over the batch of a step."""
    cliprange_value: float = Field(0.5, gt=0)
    """Largest change of a value against the one before the update."""


class AlgorithmConfig(Section):
    """The way from rewards to advantages."""

    estimator: str = "grpo"
    """Name of an advantage estimator (docs/algorithms.md) or `package.module:function` of your own; gae trains a
    critic."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(1.0, ge=0, le=1)
    """GAE's lambda."""
    reward_weights: tuple[str, ...] = ()
    """Weights of named rewards for gdpo, as `name=weight`; a reward without one has weight 1."""
    kl_in_reward_coef: float = Field(0.0, ge=0)
    """Weight of the per-token KL that is subtracted from the reward; above 0 a reference model is loaded."""
    kl_in_reward_type: KLType = "k1"
    """Estimator of the KL in the reward."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """Whether the weight of the KL in the reward moves towards `kl_target`."""
    kl_target: float = Field(0.1, gt=0)
    """KL per token that the adaptive controller aims at."""
    kl_horizon: float = Field(10_000.0, gt=0)
    """Responses over which the adaptive controller reacts."""
    allow_both_kl: bool = False
    """Allows KL in the loss and in the reward at once."""
    overlong_buffer: int = Field(0, ge=0)
    """Tokens before the response limit in which the reward falls (DAPO); 0 leaves rewards alone."""
    overlong_penalty: float = Field(1.0, ge=0)
    """What a response of full length loses."""
    max_generated_batches: int = Field(0, ge=0)
    """Dynamic sampling: groups whose scores are all equal are dropped and refilled, with at most this many generated
    batches a step; 0 keeps all groups."""
    when_too_few_groups: Literal["fill", "stop"] = "fill"
    """At that cap: fill the batch with groups of equal scores, which train nothing, or stop the run."""
    pf_ppo: Literal["none", "pow", "max_min", "max_random"] = "none"
    """Policy-filtered PPO: draw the step's responses again with probabilities from their scores."""
    pf_ppo_power: float = Field(1.0, ge=0)
    """Power of `pf_ppo=pow`."""


class CorrectionConfig(Section):
    """Correction for log-probs that differ between rollout engine and trainer."""

    weights: Literal["none", "token", "sequence"] = "none"
    """Importance weights π_old / π_rollout on the loss, of each token or of its sequence."""
    weight_bounds: tuple[float, float] = (0.0, 2.0)
    """Lower bound 0 truncates weights at the upper one; above 0 weights outside become 0 (IcePop)."""
    normalise: bool = False
    """Divide weights by their mean."""
    reject: Literal["none", "token", "sequence_mean", "sequence_sum", "sequence_max"] = "none"
    """What leaves the loss when its ratio is out of bounds: tokens, or sequences by a statistic of their log-ratios."""
    reject_bounds: tuple[float, float] = (0.5, 2.0)
    """Ratios that are kept."""
