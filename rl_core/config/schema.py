"""The typed, frozen tree of settings; the text under a field says its unit and effect.

Importable without torch, Ray, Prefect or MLflow, so that a config can be checked anywhere in a moment.
"""

import re
from typing import Literal

from pydantic import Field, model_validator

from rl_core.config.data import DataConfig, SourceConfig
from rl_core.config.gate import EvaluationConfig, GateConfig, gate_checks
from rl_core.config.learning import (
    GROUP_ESTIMATORS,
    ActorConfig,
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    OptimConfig,
    Section,
)
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
    "GateConfig",
    "OptimConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SourceConfig",
    "TrainerConfig",
]


class TinyModelConfig(Section):
    hidden_size: int = Field(64, ge=32)
    """Width of the offline model."""
    layers: int = Field(2, ge=1)
    """Number of transformer layers."""
    heads: int = Field(1, ge=1)
    """Attention heads of 64 channels each."""


class LoraConfig(Section):
    """Low-rank adapters: the model's own weights stay as they are, and are the reference. A critic trains in full."""

    rank: int = Field(0, ge=0, le=512)
    """Rank of the adapters that are trained instead of the policy's weights; 0 trains the weights themselves."""
    alpha: float = Field(32.0, gt=0)
    """What an adapter adds is multiplied by alpha ÷ rank."""
    target_modules: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Names of the linear layers that get an adapter; [all-linear] takes all but the head."""
    push: Literal["merged", "adapter"] = "merged"
    """What goes to the rollout engine after a step. merged: whole weights with the adapters added; decodes fastest.
    adapter: the adapters alone; little to send, and bfloat16 does not round small changes of the weights away."""


class ModelConfig(Section):
    path: str = "tiny"
    """Folder of a Hugging Face checkpoint, or `tiny` for the offline model that is built in code."""
    tiny: TinyModelConfig = TinyModelConfig()
    """Shape of the offline model; only used with path `tiny`."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters; off by default."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation and of the rollout engine's weights; master weights are always float32."""


class FSDPConfig(Section):
    """How actor, critic and reference lie on the devices and compute; none of it changes what is learned."""

    shard_size: int | None = Field(None, ge=1)
    """Ranks over which weights, gradients and optimizer states are sharded; unset shards over all. Fewer than all is
    HybridShard: groups of so many ranks hold a copy each."""
    sequence_parallel_size: int = Field(1, ge=1)
    """Ranks that share each sequence (Ulysses); for sequences whose activations one device cannot hold."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    compile: bool = False
    """Compile each layer with torch.compile: faster steps on CUDA after minutes of compiling."""
    offload: Literal["none", "idle", "always"] = "none"
    """CUDA: what lies in the machine's memory. idle: weights and optimizer states while they are not in use (during
    rollouts); always: weights, gradients and optimizer states, and the optimizer step runs there."""
    reference_offload: bool = False
    """CUDA: the reference's weights lie in the machine's memory and visit the device layer by layer."""


class WarmStartConfig(Section):
    steps: int = Field(0, ge=0)
    """Supervised steps on the training rows' reference answers before reinforcement; 0 leaves the stage out."""
    batch_size: int = Field(64, ge=1)
    """Rows per supervised step."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate, constant."""
    stop_loss: float = Field(0.0, ge=0)
    """Loss (nats per token, mean of the last 10 steps) at which the stage ends early; 0 runs all steps."""


class RegistryConfig(Section):
    model_name: str = "rollforward"
    """Registered model in MLflow that versions of this run belong to."""


class TrackingConfig(Section):
    uri: str | None = None
    """MLflow tracking server; unset uses a SQLite file under the home folder."""
    experiment: str = "rollforward"
    """MLflow experiment."""
    traces_per_step: int = Field(0, ge=0)
    """Trajectories of each step that become MLflow traces; each takes about 0.03 s."""


class StorageConfig(Section):
    root: str | None = None
    """Folder or URL (s3://…) that holds the runs; unset uses `runs` under the home folder."""
    timeout_s: float = Field(60.0, gt=0)
    """Longest wait for a request to a remote store, retries included; large files get a second more for each MiB."""


class RunConfig(Section):
    """Everything that a run depends on."""

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
        """Ranks that train and roll out."""
        return self.trainer.nodes * self.trainer.ranks_per_node

    @property
    def slots(self) -> int:
        """Places in the cluster: those of the ranks, and of rollouts and reward model where they have their own."""
        model, rollout = self.reward.model, self.rollout
        own = rollout.nodes * (rollout.ranks_per_node or 0)
        return self.world_size + own + (model.nodes * (model.ranks_per_node or 0) if model.path else 0)

    @property
    def colocated(self) -> bool:
        """Whether rollout engines share the places of the actor."""
        return self.rollout.ranks_per_node is None

    @property
    def rollout_ranks(self) -> int:
        """Ranks that roll out."""
        return self.world_size if self.colocated else self.rollout.nodes * (self.rollout.ranks_per_node or 0)

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence, prompt and response together."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def max_staleness(self) -> int:
        """Steps by which the weights that sample a token may be behind those that the step before made."""
        return {"sync": 0, "one_step_off": 1, "async": self.rollout.max_staleness}[self.rollout.mode]

    @property
    def multi_turn(self) -> bool:
        """Whether anything may answer the policy's first turn."""
        return bool(self.agent.tools or self.agent.mcp_servers or self.agent.environment)

    @property
    def shard_size(self) -> int:
        """Ranks that hold one copy of the weights together."""
        return self.fsdp.shard_size or self.world_size

    @property
    def data_parallel_size(self) -> int:
        """Groups of ranks that train on rows of their own."""
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
        """Whether advantages come from a value model."""
        return self.algorithm.estimator == "gae"

    def _layout_checks(self) -> list[tuple[object, str]]:
        """What has to hold of the ranks, each with the words for when it does not."""
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
                f"reward.model.nodes={self.reward.model.nodes} needs reward.model.ranks_per_node, which gives the "
                "reward model a pool of its own",
            ),
        ]

    def _rollout_checks(self) -> list[tuple[object, str]]:
        """What has to hold of rollouts, each with the words for when it does not."""
        rollout = self.rollout
        compares = self.correction.weights != "none" or self.correction.reject != "none" or self.max_staleness > 0
        return [
            (
                rollout.mode == "sync" or not self.colocated,
                f"rollout.mode={rollout.mode} makes rollouts while the actor trains and needs rollout.ranks_per_node, "
                "which gives the engines a pool of their own",
            ),
            (
                rollout.nodes == 1 or not self.colocated,
                f"rollout.nodes={rollout.nodes} needs rollout.ranks_per_node, which gives the engines a pool of their "
                "own",
            ),
            (
                self.rollout_ranks % rollout.tensor_parallel_size == 0,
                f"rollout.tensor_parallel_size={rollout.tensor_parallel_size} must divide the {self.rollout_ranks} "
                "ranks that roll out",
            ),
            (
                self.model.path != "tiny" or self.model.tiny.heads % rollout.tensor_parallel_size == 0,
                f"rollout.tensor_parallel_size={rollout.tensor_parallel_size} must divide model.tiny.heads="
                f"{self.model.tiny.heads}",
            ),
            (
                not compares or (rollout.top_p == 1 and not rollout.top_k),
                "corrections and stale rollouts compare log-probs of engine and trainer, which rollout.top_p and "
                "rollout.top_k make those of a part of the vocabulary; set rollout.top_p=1 and rollout.top_k=0",
            ),
            (
                not compares or rollout.log_probs,
                "corrections and stale rollouts need the engine's log-probs; set rollout.log_probs=true",
            ),
            (
                self.colocated or not (self.model.lora.rank and self.model.lora.push == "adapter"),
                "model.lora.push=adapter needs rollout engines on the actor's places; unset rollout.ranks_per_node or "
                "set model.lora.push=merged",
            ),
        ]

    def _data_checks(self) -> list[tuple[object, str]]:
        """What has to hold of the sources of rows."""
        alone = [
            f"data.{name}={getattr(self.data, name)}"
            for name, field in SourceConfig.model_fields.items()
            if getattr(self.data, name) != field.default
        ]
        entries = {f"data.mixture[{i}]": entry for i, entry in enumerate(self.data.mixture)}
        return [
            *(
                (
                    entry.source != "files" or (entry.path and entry.val_path),
                    f"{name}.source=files needs {name}.path (training rows) and {name}.val_path (held-out rows)",
                )
                for name, entry in (entries or {"data": self.data}).items()
            ),
            (
                not (self.data.mixture and alone),
                f"{' and '.join(alone)} would be ignored beside data.mixture, whose entries have such settings of "
                "their own",
            ),
        ]

    def _learning_checks(self) -> list[tuple[object, str]]:
        """What has to hold of advantages and losses, each with the words for when it does not."""
        return [
            (
                self.algorithm.estimator not in GROUP_ESTIMATORS or self.rollout.n > 1,
                f"algorithm.estimator={self.algorithm.estimator} compares responses of one prompt and needs rollout.n "
                "of at least 2",
            ),
            (
                self.algorithm.estimator != "gdpo"
                or not (self.algorithm.kl_in_reward_coef or self.algorithm.overlong_buffer),
                "algorithm.estimator=gdpo reads the scorer's named rewards, which algorithm.kl_in_reward_coef and "
                "algorithm.overlong_buffer do not reach; use actor.kl_loss_coef, or penalise length in the scorer",
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
                "reward.function=none leaves the scoring to others and needs reward.model.path, "
                "reward.extra_functions, or tools or an environment that give rewards",
            ),
            *self._learning_checks(),
            *self._data_checks(),
            (
                re.fullmatch(r"(?!\.{1,2}$)(?=.*\S)[^/:'\"]+", self.registry.model_name),
                f"registry.model_name={self.registry.model_name!r} must be a name without / : ' and \"",
            ),
            *gate_checks(self.evaluation, self.gate, self.needs_reference),
        ]
        problems = [message for fine, message in checks if not fine]
        if problems:
            raise ValueError("; ".join(problems))
        return self
