"""The roles that run on the ranks: actor with rollout engine and reference in one process, and the critic.

One process a device. `init_model` may be called again: it starts over from another checkpoint and keeps the live
rollout engine, which gets the new weights pushed.
"""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import ray
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from rl_core.algorithms.policy_losses import POLICY_LOSSES
from rl_core.cluster.dispatch import Dispatch, register
from rl_core.config.schema import OptimConfig, RunConfig
from rl_core.data.protocol import DataProto
from rl_core.metrics import Metrics
from rl_core.models.load import PolicyModel, ValueModel, load_causal_lm, stop_tokens
from rl_core.rollout.agent_loop import run_trajectories
from rl_core.rollout.engine import RolloutEngine, Sampling
from rl_core.rollout.sharding_manager import ShardingManager
from rl_core.storage import Store
from rl_core.training.checkpoint import export_model, load_engine, save_engine
from rl_core.training.engine import LossFunction, TrainEngine
from rl_core.training.losses import policy_loss, select_tokens, supervised_loss, value_loss

# From a mini-batch and its counts of tokens and sequences: the mini-batch with what its loss needs, and the loss.
LossOf = Callable[[DataProto, float, float], tuple[DataProto, LossFunction]]


class Worker:
    """A rank: its place in the process group and its device."""

    def __init__(self, config: RunConfig) -> None:
        """Takes the config; nothing heavy happens before `join`."""
        self.config = config
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()

    def rendezvous(self) -> tuple[str, int]:
        """Rank 0 opens the meeting point of all ranks on a free port and says where it is."""
        host = ray.util.get_node_ip_address()
        self._meeting = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._meeting.port

    def join(self, host: str, port: int) -> None:
        """Joins the process group; returns when all ranks have."""
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # vLLM reads these when it finds the group that is already there.
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
        on_gpu = torch.cuda.is_available() and self.config.trainer.device != "cpu"
        self.device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(self.config.trainer.threads_per_rank)
        store = self._meeting if rank == 0 else dist.TCPStore(host, port, is_master=False)
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size)
        self.mesh = init_device_mesh(self.device.type, (world_size,), mesh_dim_names=("shard",))

    def _train_engine(
        self, module: PolicyModel | ValueModel, optim: OptimConfig | None, total_updates: int
    ) -> TrainEngine:
        return TrainEngine(
            module,
            cast(PreTrainedModel, module.hf),
            self.mesh,
            self.device,
            self.config.model.dtype,
            optim,
            total_updates,
            self.config.actor.max_tokens_per_micro_batch,
        )

    def _train(self, engine: TrainEngine, data: DataProto, epochs: int, loss_of: LossOf, *args: float) -> Metrics:
        """All epochs over this rank's share of the step's mini-batches.

        Metrics are averaged over the updates; `first_loss` is that of the first one, whose weights are still those
        of the rollouts.
        """
        minis = data.chunk(self.config.data.train_batch_size // self.config.mini_batch_size)
        sums: Metrics = {}
        for epoch in range(epochs):
            for place, mini in enumerate(minis):
                counts = torch.tensor(
                    [mini.batch["response_mask"].sum(), float(len(mini))], dtype=torch.float64, device=self.device
                )
                dist.all_reduce(counts)
                mini, loss_function = loss_of(mini, *counts.tolist())
                metrics = engine.train_mini_batch(mini, loss_function, *args)
                if epoch == place == 0:
                    sums["first_loss"] = metrics["loss"] * epochs * len(minis)
                for name, value in metrics.items():
                    sums[name] = sums.get(name, 0.0) + value
        return {name: value / (epochs * len(minis)) for name, value in sums.items()}


class ActorRolloutRefWorker(Worker):
    """The policy in training, the rollout engine that serves it, and its reference, on one device."""

    actor: TrainEngine
    reference: TrainEngine
    rollout: RolloutEngine
    sharding: ShardingManager

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, path: str, optim: OptimConfig, total_updates: int, reference: bool) -> None:
        """Builds actor, optimizer and, if asked for, the reference from the checkpoint at `path`."""
        for name in ("actor", "reference", "policy", "sharding"):
            self.__dict__.pop(name, None)
        gc.collect()  # the old weights go before the new ones come
        self.source = Path(path)
        self.temperature = self.config.rollout.temperature
        self.stop_token_ids = stop_tokens(self.source)
        self.policy = PolicyModel(load_causal_lm(path))
        self.actor = self._train_engine(self.policy, optim, total_updates)
        if reference:
            self.reference = self._train_engine(PolicyModel(load_causal_lm(path)), None, 0)
        length = self.config.data.max_prompt_length + self.config.data.max_response_length
        if "rollout" not in self.__dict__:
            from rl_core.rollout.vllm import VLLMEngine

            self.rollout = VLLMEngine(self.source, self.config.rollout, self.config.model.dtype, length, self.device)
            self.rollout.sleep()
        self.sharding = ShardingManager(
            self.actor,
            cast(PreTrainedModel, self.policy.hf),
            self.rollout,
            self.config.model.dtype,
            self.config.rollout.canary_tolerance,
            length,
        )

    @register(Dispatch.ONE_TO_ALL)
    def push_weights(self, version: int) -> float:
        """Pushes the actor's weights into the rollout engine; returns the canary's difference."""
        return self.sharding.push(version)

    @register(Dispatch.ONE_TO_ALL)
    def sleep_rollout(self) -> None:
        """Gives the rollout engine's device memory to training."""
        self.rollout.sleep()

    @register(Dispatch.ROLLOUT_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto, temperature: float) -> DataProto:
        """Responses to `prompt_ids` with `seed` per row, at a temperature (0 is greedy)."""
        sampling = Sampling(temperature, self.config.data.max_response_length, self.stop_token_ids)
        return run_trajectories(self.rollout, prompts, sampling)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`old_log_probs`, `entropy` and `sum_pi_squared` [B, R] of the responses under the actor, at the sampling
        temperature."""
        log_probs, entropy, squares = self.actor.compute(data, self.temperature)
        return DataProto({"old_log_probs": log_probs, "entropy": entropy, "sum_pi_squared": squares}, {}, {})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_log_prob` [B, R] of the responses under the reference."""
        return DataProto({"ref_log_prob": self.reference.compute(data, self.temperature)[0]}, {}, {})

    @register(Dispatch.DP_COMPUTE_METRIC)
    def update_actor(self, data: DataProto) -> Metrics:
        """All optimizer steps of one step on the policy loss; returns metrics."""
        return self._train(self.actor, data, self.config.actor.ppo_epochs, self._policy_loss, self.temperature)

    def _policy_loss(self, mini: DataProto, tokens: float, sequences: float) -> tuple[DataProto, LossFunction]:
        if "selected_BR" in POLICY_LOSSES.resolve(self.config.actor.policy_loss).needs:
            log_prob_BR = self.actor.compute(mini, self.temperature)[0]
            mini = select_tokens(self.config, mini, log_prob_BR, self.config.trainer.seed + self.actor.updates)
        return mini, policy_loss(self.config, tokens, sequences)

    @register(Dispatch.DP_COMPUTE_METRIC)
    def update_supervised(self, data: DataProto) -> Metrics:
        """One optimizer step of cross-entropy on the given responses."""
        tokens = data.batch["response_mask"].sum().to(self.device, torch.float64)
        dist.all_reduce(tokens)
        return self.actor.train_mini_batch(data, supervised_loss(tokens.item()), 1.0)

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, store: Store, folder: str) -> None:
        """Writes the actor's shards into `folder` of the store."""
        save_engine(self.actor, store, f"{folder}/actor")

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, store: Store, folder: str) -> None:
        """Puts the state in `folder` into the actor."""
        load_engine(self.actor, store, f"{folder}/actor")

    @register(Dispatch.ONE_TO_ALL)
    def export(self, store: Store, folder: str) -> None:
        """Writes the actor as an ordinary Hugging Face folder into the store."""
        export_model(
            self.actor, cast(PreTrainedModel, self.policy.hf), self.config.model.dtype, self.source, store, folder
        )


class CriticWorker(Worker):
    """The value model and its optimizer."""

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, path: str, optim: OptimConfig, total_updates: int) -> None:
        """Builds the value model from the policy's checkpoint at `path`, with a new head."""
        self.critic = self._train_engine(ValueModel(load_causal_lm(path)), optim, total_updates)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        """`values` [B, R] of the states before each response token."""
        return DataProto({"values": self.critic.compute(data)[0]}, {}, {})

    @register(Dispatch.DP_COMPUTE_METRIC)
    def update_critic(self, data: DataProto) -> Metrics:
        """All optimizer steps of one step on the value loss; returns metrics."""
        config = self.config.critic
        return self._train(
            self.critic, data, config.ppo_epochs, lambda mini, tokens, _: (mini, value_loss(config, tokens))
        )

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, store: Store, folder: str) -> None:
        """Writes the critic's shards into `folder` of the store."""
        save_engine(self.critic, store, f"{folder}/critic")

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, store: Store, folder: str) -> None:
        """Puts the state in `folder` into the critic."""
        load_engine(self.critic, store, f"{folder}/critic")
