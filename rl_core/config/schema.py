"""The typed, frozen tree of settings; the text under a field says its unit and effect.

Importable without torch, Ray, Prefect or MLflow, so that a config can be checked anywhere in a moment.
"""

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

KLType = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]
GROUP_ESTIMATORS = (
    "grpo", "dr_grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "optimal_token_baseline",
    "gdpo",
)  # fmt: skip


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values never change after parsing."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class DataConfig(Section):
    source: str = "sort_digits"
    """Where rows come from: the name of a module in rl_core/data/sources, or `parquet` for your own files."""
    path: str | None = None
    """Folder, file or URL that the source reads; sources that make their rows on the fly need none."""
    val_path: str | None = None
    """Held-out file; only read by source `parquet`."""
    train_rows: int | None = Field(None, ge=1)
    """Number of training rows to make or keep; unset keeps all (a source that makes rows has its own default)."""
    val_rows: int | None = Field(None, ge=1)
    """Number of held-out rows to make or keep; unset keeps all."""
    difficulty: int = Field(5, ge=1)
    """Size of a made problem (digits in a line for `sort_digits`)."""
    train_batch_size: int = Field(64, ge=1)
    """Prompts per step."""
    max_prompt_length: int = Field(512, ge=1)
    """Tokens; a longer prompt is handled as `overlong_prompts` says."""
    max_response_length: int = Field(512, ge=1)
    """Tokens that a response may have, its end token included."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """Stop before training (error) or leave such rows out and count them (drop)."""


class TinyModelConfig(Section):
    hidden_size: int = Field(64, ge=32)
    """Width of the offline model."""
    layers: int = Field(2, ge=1)
    """Number of transformer layers."""
    heads: int = Field(1, ge=1)
    """Attention heads of 64 channels each."""


class ModelConfig(Section):
    path: str = "tiny"
    """Folder of a Hugging Face checkpoint, or `tiny` for the offline model that is built in code."""
    tiny: TinyModelConfig = TinyModelConfig()
    """Shape of the offline model; only used with path `tiny`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation and of the rollout engine's weights; master weights are always float32."""


class WarmStartConfig(Section):
    steps: int = Field(0, ge=0)
    """Supervised steps on the training rows' reference answers before reinforcement; 0 leaves the stage out."""
    batch_size: int = Field(64, ge=1)
    """Rows per supervised step."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate, constant."""
    stop_loss: float = Field(0.0, ge=0)
    """Loss (nats per token, mean of the last 10 steps) at which the stage ends early; 0 runs all steps."""


class OptimConfig(Section):
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


class ActorConfig(Section):
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
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """Optimizer of the value model."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over the batch of a step."""
    cliprange_value: float = Field(0.5, gt=0)
    """Largest change of a value against the one before the update."""


class AlgorithmConfig(Section):
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


class RolloutConfig(Section):
    n: int = Field(8, ge=1)
    """Responses per prompt."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of training rollouts; the trainer's log-probs use it too."""
    max_num_seqs: int = Field(256, ge=1)
    """Sequences that one engine decodes at a time."""
    kv_cache_gb: float = Field(0.25, gt=0)
    """GiB of key/value cache per engine on a CPU."""
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1)
    """Share of a GPU's memory that the engine may take (weights and key/value cache)."""
    canary_tolerance: float = Field(1e-3, gt=0)
    """Largest difference of log-probs between trainer and engine after a weight push; above it training stops."""


class RewardConfig(Section):
    function: str | None = None
    """Scorer for all rows: a name from rl_core/rewards/scorers.py or `package.module:function`; unset takes the
    scorer of each row's `data_source`. It returns a number, or a dict with `score` and further named rewards."""
    timeout_s: float = Field(10.0, gt=0)
    """Seconds for one response; then the scoring process is killed and the response counts as failed."""
    processes: int = Field(1, ge=1)
    """Scoring processes."""
    max_failed_share: float = Field(0.1, ge=0, le=1)
    """Share of a step's responses that may fail to score; above it the step stops."""
    shuffle_control: bool = False
    """Negative control: hand each reward to another prompt of the step. Nothing should be learned."""


class TrainerConfig(Section):
    steps: int = Field(100, ge=1)
    """Steps of reinforcement learning in the run."""
    segment_steps: int = Field(50, ge=1)
    """Steps per task run of the train stage."""
    save_every: int = Field(1, ge=1)
    """Steps per checkpoint; a crash repeats at most this many steps."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints that are kept."""
    seed: int = Field(0, ge=0)
    """Seed of data order, initial weights and sampling."""
    nodes: int = Field(1, ge=1)
    """Machines of the Ray cluster to use."""
    ranks_per_node: int = Field(1, ge=1)
    """Worker processes per machine: one a GPU, or any number on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where training and rollouts run; auto takes CUDA where there is a GPU."""
    threads_per_rank: int = Field(1, ge=1)
    """CPU threads of each worker process; results are equal bit for bit only with the same number."""
    call_timeout_s: float = Field(3600.0, gt=0)
    """Longest wait for one call to the workers."""
    max_attempts: int = Field(3, ge=1)
    """Tries of each stage when workers are lost or storage fails."""


class EvaluationConfig(Section):
    sampled_n: int = Field(4, ge=1)
    """Sampled responses per held-out prompt."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of the sampled score."""


class RegistryConfig(Section):
    model_name: str = "rollforward"
    """Registered model in MLflow that versions of this run belong to."""
    promote: bool = True
    """Move the alias champion to the new version when its score is not below the champion's."""
    min_score: float = 0.0
    """Score (greedy, 0 to 1) below which nothing becomes champion."""


class TrackingConfig(Section):
    uri: str | None = None
    """MLflow tracking server; unset uses a SQLite file under the home folder."""
    experiment: str = "rollforward"
    """MLflow experiment."""


class StorageConfig(Section):
    root: str | None = None
    """Folder or URL (s3://…) that holds the runs; unset uses `runs` under the home folder."""


class RunConfig(Section):
    """Everything that a run depends on."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    correction: CorrectionConfig = CorrectionConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    registry: RegistryConfig = RegistryConfig()
    tracking: TrackingConfig = TrackingConfig()
    storage: StorageConfig = StorageConfig()

    @property
    def world_size(self) -> int:
        """Worker processes of the run."""
        return self.trainer.nodes * self.trainer.ranks_per_node

    @property
    def mini_batch_size(self) -> int:
        """Prompts per optimizer step."""
        return self.actor.mini_batch_size or self.data.train_batch_size

    @property
    def needs_reference(self) -> bool:
        """Whether the loss or the reward has a KL term."""
        return self.actor.kl_loss_coef > 0 or self.algorithm.kl_in_reward_coef > 0

    @property
    def needs_critic(self) -> bool:
        """Whether advantages come from a value model."""
        return self.algorithm.estimator == "gae"

    @model_validator(mode="after")
    def _combinations(self) -> "RunConfig":
        batch, mini, n = self.data.train_batch_size, self.mini_batch_size, self.rollout.n
        checks = [
            (batch % mini == 0, f"actor.mini_batch_size={mini} must divide data.train_batch_size={batch}"),
            (
                mini * n % self.world_size == 0,
                f"actor.mini_batch_size × rollout.n = {mini * n} responses must be a multiple of the "
                f"{self.world_size} ranks (trainer.nodes × trainer.ranks_per_node)",
            ),
            (
                self.algorithm.estimator not in GROUP_ESTIMATORS or n > 1,
                f"algorithm.estimator={self.algorithm.estimator} compares responses of one prompt and needs rollout.n "
                "of at least 2",
            ),
            (
                self.algorithm.allow_both_kl
                or not (self.actor.kl_loss_coef > 0 and self.algorithm.kl_in_reward_coef > 0),
                "KL is both in the loss (actor.kl_loss_coef) and in the reward (algorithm.kl_in_reward_coef); "
                "set one to 0 or algorithm.allow_both_kl=true",
            ),
            (
                self.data.max_prompt_length + self.data.max_response_length <= self.actor.max_tokens_per_micro_batch,
                f"actor.max_tokens_per_micro_batch={self.actor.max_tokens_per_micro_batch} cannot hold one sequence of "
                f"data.max_prompt_length + data.max_response_length = "
                f"{self.data.max_prompt_length + self.data.max_response_length} tokens",
            ),
            (
                all(re.fullmatch(r"[^=]+=-?\d+(\.\d+)?", pair) for pair in self.algorithm.reward_weights),
                "algorithm.reward_weights takes entries NAME=WEIGHT such as length=0.5, not "
                + ", ".join(self.algorithm.reward_weights),
            ),
            (
                self.correction.weight_bounds[0] < self.correction.weight_bounds[1],
                "the lower one of correction.weight_bounds comes first",
            ),
            (
                self.correction.reject_bounds[0] < self.correction.reject_bounds[1],
                "the lower one of correction.reject_bounds comes first",
            ),
            (
                self.data.source != "parquet" or (self.data.path and self.data.val_path),
                "data.source=parquet needs data.path (training rows) and data.val_path (held-out rows)",
            ),
        ]
        problems = [message for fine, message in checks if not fine]
        if problems:
            raise ValueError("; ".join(problems))
        return self
