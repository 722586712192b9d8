"""Training workers: actor with reference and colocated rollout engine in one process, and the critic.

One process per device. Calling `init_model` again starts over from another checkpoint; the existing rollout engine is
kept and receives the new weights by a push.
"""

import asyncio
import gc
import socket
import statistics
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from rl_core.algorithms.policy_losses import POLICY_LOSSES
from rl_core.cluster.base_worker import Worker, collective_timeout, sampling_of, start_responders, start_scoring
from rl_core.cluster.dispatch import Dispatch, register
from rl_core.cluster.network import node_address
from rl_core.config.schema import OptimConfig
from rl_core.data.protocol import DataProto, Metrics
from rl_core.models.load import PolicyModel, ValueModel, empty_causal_lm, stop_tokens
from rl_core.models.lora import adapters_off, add_adapters
from rl_core.models.narrow import has_experts
from rl_core.rollout.agent.agent_loop import roll_out
from rl_core.rollout.engine.factory import build_engine
from rl_core.rollout.engine.protocol import RolloutEngine
from rl_core.rollout.weights.canary import Canary, canary_of
from rl_core.rollout.weights.transfer import NcclBroadcast, buckets
from rl_core.rollout.weights.weight_sync import ShardingManager
from rl_core.storage.manifest import Json
from rl_core.storage.store import Store
from rl_core.training.engine import DTYPES, LossFunction, Outputs, TrainEngine
from rl_core.training.gpu_usage import GpuUsage, gpu_usage
from rl_core.training.losses import LOG_PROB_COLUMNS, policy_loss, select_tokens, supervised_loss, value_loss
from rl_core.training.mesh import make_rank_mesh
from rl_core.training.profiling import Profile
from rl_core.training.sharded_checkpoint import export_model, load_engine, save_engine

# (mini-batch, number of tokens, number of sequences) → (mini-batch with the columns its loss needs, loss).
LossOf = Callable[[DataProto, float, float], tuple[DataProto, LossFunction]]


class TrainingWorker(Worker):
    """A training rank, with its position in the meshes of shards and sequences."""

    saved: Future[list[Json]]
    profile: Profile | None = None

    def join(self, host: str, port: int) -> None:
        """Joins the process group and builds the meshes; returns once all ranks have joined."""
        super().join(host, port)
        config = self.config
        self.rank_mesh = make_rank_mesh(
            self.device, dist.get_world_size(), config.shard_size, config.fsdp.sequence_parallel_size
        )
        self.save_group = dist.new_group(backend="gloo", timeout=collective_timeout(config))

    @register(Dispatch.ONE_TO_ALL)
    def finish_checkpoint(self) -> list[Json]:
        """Waits until this rank has written its last saved state; returns its manifest entries, or raises the error of
        the write."""
        return self.saved.result()

    @register(Dispatch.ONE_TO_ALL)
    def start_profile(self) -> None:
        """Starts a profile of this rank; ends that of an abandoned step."""
        if self.profile:
            self.profile.stop()
        self.profile = Profile(self.device)

    @register(Dispatch.ONE_TO_ALL)
    def write_profile(self, store: Store, folder: str) -> None:
        """Ends the profile and writes it into the folder of the store."""
        if self.profile:
            self.profile.write(store, f"{folder}/{type(self).__name__}_{dist.get_rank()}")
            self.profile = None

    def _train_engine(
        self, module: PolicyModel | ValueModel, source: Path, optim: OptimConfig | None, total_updates: int
    ) -> TrainEngine:
        return TrainEngine(
            module,
            source,
            self.rank_mesh,
            self.config.fsdp,
            self.config.model.dtype,
            optim,
            total_updates,
            self.config.actor.max_tokens_per_micro_batch,
            self.config.trainer.seed,
        )

    def _train(
        self,
        engine: TrainEngine,
        data: DataProto,
        epochs: int,
        loss_of: LossOf,
        *args: float,
        keep: Outputs | None = None,
    ) -> Metrics:
        """Runs all epochs over this rank's share of the mini-batches; returns metrics as of `mean_of_updates`.

        `keep` receives the engine's outputs.
        """
        minis = data.chunk(self.config.data.train_batch_size // self.config.mini_batch_size)
        updates: list[Metrics] = []
        for _ in range(epochs):
            for mini in minis:
                tokens_B = mini.batch["response_mask"].sum(-1)
                # Fully masked sequences do not count in the denominators.
                counts = torch.stack([tokens_B.sum(), (tokens_B > 0).sum()]).to(self.device, torch.float64)
                dist.all_reduce(counts)
                counts /= self.config.fsdp.sequence_parallel_size  # ranks that share sequences hold the same rows
                mini, loss_function = loss_of(mini, *counts.tolist())
                updates.append(engine.train_mini_batch(mini, loss_function, *args, keep=keep))
        return mean_of_updates(updates)


class ActorRolloutRefWorker(TrainingWorker):
    """The trained policy and its reference on one device, with the rollout engine unless that has its own pool."""

    actor: TrainEngine
    reference: TrainEngine
    rollout: RolloutEngine
    sharding: ShardingManager
    link: NcclBroadcast | None = None

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, path: str, optim: OptimConfig, total_updates: int, reference: bool) -> None:
        """Builds actor, optimizer and, if requested, the reference from the checkpoint at `path`.

        With LoRA the actor without its adapters is the reference.
        """
        for name in ("actor", "reference", "sharding"):
            self.__dict__.pop(name, None)
        gc.collect()  # free the old weights before loading the new ones
        self.source = Path(path)
        self.temperature = self.config.rollout.temperature
        self.stop_token_ids = stop_tokens(self.source)
        lora = self.config.model.lora
        self.actor = self._train_engine(self._policy(), self.source, optim, total_updates)
        if reference and not lora.rank:
            self.reference = self._train_engine(self._policy(), self.source, None, 0)
        if self.config.colocated:
            self._init_rollout()

    def _init_rollout(self) -> None:
        lora = self.config.model.lora
        as_adapter = lora.rank > 0 and lora.push == "adapter"
        if "rollout" not in self.__dict__:
            self.rollout = build_engine(self.source, self.config, self.device, lora.rank if as_adapter else 0)
            self.rollout.sleep()
            self.loop = asyncio.new_event_loop()
            if not self.rollout.is_follower:
                self.responders = self.loop.run_until_complete(start_responders(self.config, self.source))
                self.scoring = self.loop.run_until_complete(start_scoring(self.config, self.source))
        self.sharding = ShardingManager(
            self.actor,
            self.rollout,
            self.config.model.dtype,
            self.config.rollout.canary_tolerance,
            self.config.max_length,
            as_adapter,
        )

    def _policy(self) -> PolicyModel:
        model, lora = empty_causal_lm(self.source), self.config.model.lora
        return PolicyModel(add_adapters(model, lora) if lora.rank else model, self.config.fsdp.compile)

    @register(Dispatch.ONE_TO_ALL)
    def push_weights(self, version: int) -> float:
        """Pushes the actor's weights into the rollout engine; returns the canary's log-prob difference."""
        return self.sharding.push(version)

    @register(Dispatch.ONE_TO_ALL)
    def sleep_rollout(self) -> None:
        """Releases the rollout engine's device memory to training."""
        self.rollout.sleep()

    @register(Dispatch.ONE_TO_ALL)
    def canary(self) -> Canary:
        """The actor's log-probs of fixed tokens, for engines in their own pool."""
        return canary_of(self.actor, self.config.max_length)

    @register(Dispatch.RANK_ZERO)
    def free_port(self) -> tuple[str, int]:
        """This machine's address, and a free port."""
        host = node_address()
        with socket.socket() as listener:
            listener.bind((host, 0))
            return host, listener.getsockname()[1]

    @register(Dispatch.RANK_ZERO)
    def link_rollouts(self, host: str, port: int, world_size: int) -> None:
        """Joins the NCCL group with the rollout pool as rank 0; the other `world_size` − 1 ranks are the pool's."""
        if self.link:
            self.link.close()
        self.link = NcclBroadcast(host, port, 0, world_size, self.device)

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(self) -> list[ray.ObjectRef[Any]]:
        """Sends all weights to the rollout pool over NCCL, or through Ray's object store; then rank 0 returns the
        references to fetch."""
        dtype = DTYPES[self.config.model.dtype]
        whole = self.actor.in_dtype(self.actor.full_parameters(), dtype)
        refs: list[ray.ObjectRef[Any]] = []
        if dist.get_rank() > 0:
            deque(whole, maxlen=0)  # participate in the gather
        elif self.link:
            self.link.send(buckets(whole))
        else:
            refs = [ray.put(bucket) for bucket in buckets(whole)]
        self.actor.offload()
        return refs

    @register(Dispatch.ROLLOUT_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto, temperature: float) -> DataProto:
        """Responses to the columns `prompt_ids` and `seed`, at a temperature (0: greedy)."""
        if self.rollout.is_follower:
            self.loop.run_until_complete(self.rollout.follow())
            return prompts  # results of following ranks are not collected
        sampling = sampling_of(self.config, temperature, self.stop_token_ids)
        rollouts = roll_out(self.rollout, prompts, sampling, self.config.agent, self.responders, self.scoring)
        return self.loop.run_until_complete(rollouts)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Returns `old_log_probs`, `entropy` and `sum_pi_squared` [B, R] of the responses under the actor, at the
        sampling temperature."""
        return DataProto(dict(zip(LOG_PROB_COLUMNS, self.actor.compute(data, self.temperature), strict=True)))

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Returns `ref_log_prob` [B, R] of the responses under the reference."""
        if self.config.model.lora.rank:
            with adapters_off(self.actor.model):
                log_probs = self.actor.compute(data, self.temperature)[0]
        else:
            log_probs = self.reference.compute(data, self.temperature)[0]
            self.reference.offload()
        return DataProto({"ref_log_prob": log_probs})

    @register(Dispatch.DP_UPDATE)
    def update_actor(self, data: DataProto) -> tuple[DataProto, Metrics]:
        """Runs all optimizer updates of one step on the policy loss; returns the columns of `compute_log_prob`, if the
        data lack them, and metrics. Such data are for a single update, whose forward pass gives the columns."""
        outputs = Outputs() if LOG_PROB_COLUMNS[0] not in data.batch else None
        metrics = self._train(
            self.actor, data, self.config.actor.ppo_epochs, self._policy_loss, self.temperature, keep=outputs
        )
        columns = dict(zip(LOG_PROB_COLUMNS, outputs.on_cpu(), strict=True)) if outputs else {}
        return DataProto(columns), metrics

    def _policy_loss(self, mini: DataProto, tokens: float, sequences: float) -> tuple[DataProto, LossFunction]:
        if "selected_BR" in POLICY_LOSSES.resolve(self.config.actor.policy_loss).needs:
            log_prob_BR = self.actor.compute(mini, self.temperature)[0]
            mini = select_tokens(self.config, mini, log_prob_BR, self.config.trainer.seed + self.actor.updates)
        return mini, policy_loss(self.config, tokens, sequences)

    @register(Dispatch.ONE_TO_ALL)
    def gpu_usage(self) -> GpuUsage:
        """The actor's use of this rank's GPU since the last call; on CUDA only."""
        dense = not (self.config.needs_critic or has_experts(self.actor.model.config))
        return gpu_usage(self.actor.module, self.device, dense)

    @register(Dispatch.DP_COMPUTE_METRIC)
    def update_supervised(self, data: DataProto) -> Metrics:
        """Runs one optimizer update on the cross-entropy of the given responses; returns metrics."""
        tokens = data.batch["response_mask"].sum().to(self.device, torch.float64)
        dist.all_reduce(tokens)
        tokens /= self.config.fsdp.sequence_parallel_size
        return self.actor.train_mini_batch(data, supervised_loss(tokens.item()), 1.0)

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, store: Store, folder: str) -> None:
        """Starts writing the actor's current state into `folder` of the store."""
        self.saved = save_engine(self.actor, store, f"{folder}/actor", self.save_group)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, store: Store, folder: str) -> None:
        """Loads the actor's state from `folder`."""
        load_engine(self.actor, store, f"{folder}/actor")

    @register(Dispatch.ONE_TO_ALL)
    def export(self, store: Store, folder: str) -> list[Json]:
        """Writes the actor as a Hugging Face folder into the store; returns the manifest entries of its files."""
        return export_model(self.actor, self.config.model.dtype, self.source, store, folder)


class CriticWorker(TrainingWorker):
    """The value model and its optimizer."""

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, path: str, optim: OptimConfig, total_updates: int) -> None:
        """Builds the value model from the policy's checkpoint at `path`, with a new head."""
        self.critic = self._train_engine(ValueModel(empty_causal_lm(path)), Path(path), optim, total_updates)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        """Returns `values` [B, R] of the states before each response token."""
        return DataProto({"values": self.critic.compute(data)[0]})

    @register(Dispatch.DP_COMPUTE_METRIC)
    def update_critic(self, data: DataProto) -> Metrics:
        """Runs all optimizer updates of one step on the value loss; returns metrics."""
        config = self.config.critic
        metrics = self._train(
            self.critic, data, config.ppo_epochs, lambda mini, tokens, _: (mini, value_loss(config, tokens))
        )
        self.critic.offload()
        return metrics

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, store: Store, folder: str) -> None:
        """Starts writing the critic's current state into `folder` of the store."""
        self.saved = save_engine(self.critic, store, f"{folder}/critic", self.save_group)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, store: Store, folder: str) -> None:
        """Loads the critic's state from `folder`."""
        load_engine(self.critic, store, f"{folder}/critic")


def mean_of_updates(updates: list[Metrics]) -> Metrics:
    """Mean of each metric over the applied updates, plus `skipped_updates` (their number) and `first_loss`.

    `first_loss` is the loss of the first update, at which the weights are still those of the rollouts.
    """
    applied = [metrics for metrics in updates if not metrics["skipped_updates"]]
    means = {name: statistics.fmean(metrics[name] for metrics in applied) for name in (applied[0] if applied else {})}
    if "loss" in updates[0]:
        means["first_loss"] = updates[0]["loss"]
    return {**means, "skipped_updates": float(len(updates) - len(applied))}
