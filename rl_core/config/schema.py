"""The typed, frozen configuration schema; the docstring under a field gives its unit and effect.

Importable without torch or Ray, so a config can be validated quickly on any machine.
"""

import re
from typing import Annotated

from pydantic import Field, model_validator

from rl_core.config.data import DataConfig, SourceConfig
from rl_core.config.gate import EvaluationConfig, GateConfig, gate_checks
from rl_core.config.learning import (
    ALWAYS,
    GROUP_ESTIMATORS,
    MAX_COUNT,
    MAX_SECONDS,
    MAX_VALUE,
    ActorConfig,
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    OptimConfig,
    Section,
)
from rl_core.config.model import FSDPConfig, LoraConfig, ModelConfig, TinyModelConfig
from rl_core.config.reward import RewardConfig
from rl_core.config.rollout import AgentConfig, RolloutConfig
from rl_core.config.trainer import TrainerConfig

__all__ = [
    "ActorConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "CorrectionConfig",
    "CriticConfig",
    "DataConfig",
    "EvaluationConfig",
    "FSDPConfig",
    "GateConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SourceConfig",
    "TinyModelConfig",
    "TrainerConfig",
]


class WarmStartConfig(Section):
    steps: int = Field(0, ge=0, le=MAX_COUNT)
    """Supervised steps on the reference answers of training rows before reinforcement learning; 0 skips the stage."""
    batch_size: int = Field(64, ge=1, le=MAX_COUNT)
    """Rows per supervised step."""
    lr: float = Field(1e-3, gt=0, le=10.0)
    """Constant learning rate."""
    stop_loss: float = Field(0.0, ge=0, le=MAX_VALUE)
    """Loss (nats per token, mean of the last 10 steps) at which the stage stops early; 0 runs all steps."""


class RegistryConfig(Section):
    model_name: str = "rollforward"
    """Registered model in MLflow under which this run registers its versions."""


class TrackingConfig(Section):
    uri: Annotated[str | None, ALWAYS] = None
    """URI of the MLflow tracking server; unset: a SQLite file in the home folder."""
    experiment: str = "rollforward"
    """Name of the MLflow experiment."""
    traces_per_step: int = Field(0, ge=0, le=MAX_COUNT)
    """Trajectories per step logged as MLflow traces; each takes about 0.03 s."""


class StorageConfig(Section):
    root: str | None = None
    """Folder or URL (s3://…) that holds the runs; unset: `runs` in the home folder."""
    timeout_s: float = Field(60.0, gt=0, le=MAX_SECONDS)
    """Maximum seconds per request to a remote store, retries included; large files get one more second per MiB."""


class RunConfig(Section):
    """Full configuration of a run."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    fsdp: FSDPConfig = FSDPConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    correction: CorrectionConfig = CorrectionConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    rollout: RolloutConfig = RolloutConfig()
    agent: AgentConfig = AgentConfig()
    reward: RewardConfig = RewardConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    gate: GateConfig = GateConfig()
    registry: RegistryConfig = RegistryConfig()
    tracking: TrackingConfig = TrackingConfig()
    storage: StorageConfig = StorageConfig()

    @property
    def world_size(self) -> int:
        """Number of training ranks; colocated rollout engines use the same ones."""
        return self.trainer.nodes * self.trainer.ranks_per_node

    @property
    def slots(self) -> int:
        """Cluster slots needed: training ranks plus the separate pools of rollout engines and reward model, if any."""
        model, rollout = self.reward.model, self.rollout
        own = rollout.nodes * (rollout.ranks_per_node or 0)
        return self.world_size + own + (model.nodes * (model.ranks_per_node or 0) if model.path else 0)

    @property
    def colocated(self) -> bool:
        """Whether rollout engines share the actor's slots."""
        return self.rollout.ranks_per_node is None

    @property
    def rollout_ranks(self) -> int:
        """Number of ranks that generate rollouts."""
        return self.world_size if self.colocated else self.rollout.nodes * (self.rollout.ranks_per_node or 0)

    @property
    def max_length(self) -> int:
        """Maximum tokens of a sequence (prompt and response)."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def max_staleness(self) -> int:
        """Maximum steps by which the weights that sample a token may lag behind the newest ones."""
        return {"sync": 0, "one_step_off": 1, "async": self.rollout.max_staleness}[self.rollout.mode]

    @property
    def multi_turn(self) -> bool:
        """Whether tools or an environment may respond to the policy's turns."""
        return bool(self.agent.tools or self.agent.mcp_servers or self.agent.environment)

    @property
    def shard_size(self) -> int:
        """Number of ranks that together hold one copy of the weights."""
        return self.fsdp.shard_size or self.world_size

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel groups of ranks."""
        return self.world_size // self.fsdp.sequence_parallel_size

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
        """Whether advantages are computed with a value model."""
        return self.algorithm.estimator == "gae"

    def _layout_checks(self) -> list[tuple[object, str]]:
        """Checks of ranks and sharding: (condition, message if it fails)."""
        rows = self.mini_batch_size * self.rollout.n
        return [
            (
                rows % self.data_parallel_size == 0,
                f"actor.mini_batch_size × rollout.n = {rows} responses must be a multiple of the "
                f"{self.data_parallel_size} data-parallel ranks (trainer.nodes × trainer.ranks_per_node ÷ "
                "fsdp.sequence_parallel_size)",
            ),
            (
                self.world_size % self.shard_size == 0,
                f"fsdp.shard_size={self.shard_size} must divide the {self.world_size} ranks (trainer.nodes × "
                "trainer.ranks_per_node)",
            ),
            (
                self.world_size % self.fsdp.sequence_parallel_size == 0,
                f"fsdp.sequence_parallel_size={self.fsdp.sequence_parallel_size} must divide the "
                f"{self.world_size} ranks (trainer.nodes × trainer.ranks_per_node)",
            ),
            (
                self.warm_start.batch_size % self.data_parallel_size == 0 or not self.warm_start.steps,
                f"warm_start.batch_size={self.warm_start.batch_size} must be a multiple of the "
                f"{self.data_parallel_size} data-parallel ranks",
            ),
            (
                self.reward.model.nodes == 1 or self.reward.model.ranks_per_node,
                f"reward.model.nodes={self.reward.model.nodes} requires reward.model.ranks_per_node (a separate pool "
                "for the reward model)",
            ),
        ]

    def _rollout_checks(self) -> list[tuple[object, str]]:
        """Checks of the rollout settings: (condition, message if it fails)."""
        rollout = self.rollout
        compares_log_probs = (
            self.correction.weights != "none" or self.correction.reject != "none" or self.max_staleness > 0
        )
        return [
            (
                rollout.mode == "sync" or not self.colocated,
                f"rollout.mode={rollout.mode} generates rollouts while the actor trains and requires "
                "rollout.ranks_per_node (a separate pool for the engines)",
            ),
            (
                rollout.nodes == 1 or not self.colocated,
                f"rollout.nodes={rollout.nodes} requires rollout.ranks_per_node (a separate pool for the engines)",
            ),
            (
                self.rollout_ranks % rollout.tensor_parallel_size == 0,
                f"rollout.tensor_parallel_size={rollout.tensor_parallel_size} must divide the {self.rollout_ranks} "
                "rollout ranks",
            ),
            (
                rollout.tensor_parallel_size == 1 or rollout.engine != "transformers",
                f"rollout.tensor_parallel_size={rollout.tensor_parallel_size} requires rollout.engine=vllm: "
                "rollout.engine=transformers serves the model on one rank",
            ),
            (
                self.model.path != "tiny" or self.model.tiny.heads % rollout.tensor_parallel_size == 0,
                f"rollout.tensor_parallel_size={rollout.tensor_parallel_size} must divide model.tiny.heads="
                f"{self.model.tiny.heads}",
            ),
            (
                not compares_log_probs or (rollout.top_p == 1 and not rollout.top_k),
                "corrections and stale rollouts compare log-probs of engine and trainer over the full vocabulary and "
                "require rollout.top_p=1 and rollout.top_k=0",
            ),
            (
                not compares_log_probs or rollout.log_probs,
                "corrections and stale rollouts require the engine's log-probs (rollout.log_probs=true)",
            ),
            (
                self.colocated or not (self.model.lora.rank and self.model.lora.push == "adapter"),
                "model.lora.push=adapter requires rollout engines that share the actor's slots (rollout.ranks_per_node "
                "unset), otherwise use model.lora.push=merged",
            ),
        ]

    def _data_checks(self) -> list[tuple[object, str]]:
        """Checks of the data sources: (condition, message if it fails)."""
        ignored = [
            f"data.{name}={getattr(self.data, name)}"
            for name, field in SourceConfig.model_fields.items()
            if getattr(self.data, name) != field.default
        ]
        entries = {f"data.mixture[{i}]": entry for i, entry in enumerate(self.data.mixture)}
        return [
            *(
                (
                    entry.source != "files" or (entry.path and entry.val_path),
                    f"{name}.source=files requires {name}.path (training rows) and {name}.val_path (held-out rows)",
                )
                for name, entry in (entries or {"data": self.data}).items()
            ),
            (
                not (self.data.mixture and ignored),
                f"{' and '.join(ignored)} would be ignored because data.mixture is set (set this in its entries)",
            ),
        ]

    def _learning_checks(self) -> list[tuple[object, str]]:
        """Checks of advantages and losses: (condition, message if it fails)."""
        return [
            (
                self.algorithm.estimator not in GROUP_ESTIMATORS or self.rollout.n > 1,
                f"algorithm.estimator={self.algorithm.estimator} compares responses to the same prompt and requires "
                "rollout.n of at least 2",
            ),
            (
                self.algorithm.estimator != "gdpo"
                or not (self.algorithm.kl_in_reward_coef or self.algorithm.overlong_buffer),
                "algorithm.estimator=gdpo uses the scorer's named rewards, to which algorithm.kl_in_reward_coef and "
                "algorithm.overlong_buffer do not apply (use actor.kl_loss_coef, or penalise length in the scorer)",
            ),
            (
                self.algorithm.allow_both_kl
                or not (self.actor.kl_loss_coef > 0 and self.algorithm.kl_in_reward_coef > 0),
                "KL is both in the loss (actor.kl_loss_coef) and in the reward (algorithm.kl_in_reward_coef), which "
                "requires algorithm.allow_both_kl=true",
            ),
            (
                self.data.max_prompt_length + self.data.max_response_length <= self.actor.max_tokens_per_micro_batch,
                f"actor.max_tokens_per_micro_batch={self.actor.max_tokens_per_micro_batch} is less than one sequence, "
                f"data.max_prompt_length + data.max_response_length = "
                f"{self.data.max_prompt_length + self.data.max_response_length} tokens",
            ),
            (
                all(re.fullmatch(r"[^=]+=-?\d{1,12}(\.\d+)?", pair) for pair in self.algorithm.reward_weights),
                "algorithm.reward_weights takes entries of the form NAME=WEIGHT such as length=0.5, not "
                + ", ".join(self.algorithm.reward_weights),
            ),
            (
                self.correction.weight_bounds[0] < self.correction.weight_bounds[1],
                "correction.weight_bounds must be in ascending order",
            ),
            (
                self.correction.reject_bounds[0] < self.correction.reject_bounds[1],
                "correction.reject_bounds must be in ascending order",
            ),
            (
                self.actor.clip_cov_low < self.actor.clip_cov_high,
                f"actor.clip_cov_low={self.actor.clip_cov_low:g} must be below actor.clip_cov_high="
                f"{self.actor.clip_cov_high:g}",
            ),
        ]

    @model_validator(mode="after")
    def _combinations(self) -> "RunConfig":
        batch, mini = self.data.train_batch_size, self.mini_batch_size
        checks: list[tuple[object, str]] = [
            *self._layout_checks(),
            (batch % mini == 0, f"actor.mini_batch_size={mini} must divide data.train_batch_size={batch}"),
            *self._rollout_checks(),
            (
                self.reward.function != "none"
                or self.reward.model.path
                or self.reward.extra_functions
                or self.multi_turn,
                "reward.function=none requires another source of rewards: reward.model.path, reward.extra_functions, "
                "agent.tools, agent.mcp_servers or agent.environment",
            ),
            (
                self.model.path != "tiny" or not (self.model.chat_template or self.data.chat_template_kwargs),
                "model.chat_template and data.chat_template_kwargs require model.path=FOLDER: model.path=tiny has a "
                "template of its own",
            ),
            *self._learning_checks(),
            *self._data_checks(),
            (
                re.fullmatch(r"(?!\.{1,2}$)(?=.*\S)[^/:'\"]+", self.registry.model_name),
                f"registry.model_name={self.registry.model_name!r} must not be blank or contain / : ' or \"",
            ),
            *gate_checks(self.evaluation, self.gate, self.needs_reference),
        ]
        problems = [message for passed, message in checks if not passed]
        if problems:
            raise ValueError("; ".join(problems))
        return self
