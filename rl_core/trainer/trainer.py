"""PPOTrainer: the reinforcement-learning loop on the driver, from prompts to a committed step."""

import time
from contextlib import nullcontext
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from rl_core.algorithms.kl import KLController
from rl_core.cluster.resources import resolve_device
from rl_core.cluster.roles import Roles
from rl_core.config.schema import RunConfig
from rl_core.config.updates import mini_batches
from rl_core.data.dataset import RLHFDataset
from rl_core.data.loader import StatefulLoader
from rl_core.data.protocol import DataProto, Metrics
from rl_core.errors import TrainingError
from rl_core.storage import run_files
from rl_core.storage.ledger import Ledger
from rl_core.storage.manifest import Json
from rl_core.storage.store import Store
from rl_core.trainer.advantage import apply_correction_and_kl, compute_advantages
from rl_core.trainer.batch import balanced_order, log_probs_with_update, training_rows
from rl_core.trainer.checkpoints import Checkpointer
from rl_core.trainer.metrics import Phases, batch_metrics, mismatch
from rl_core.trainer.observer import RunObserver
from rl_core.trainer.rollout_file import write_rollouts
from rl_core.trainer.rollout_queue import STATE_KEY, RolloutQueue
from rl_core.trainer.sampler import Sampler
from rl_core.training.gpu_usage import gpu_metrics


class PPOTrainer:
    """Trains one run: starts from the last committed step, and records every step."""

    def __init__(
        self,
        config: RunConfig,
        store: Store,
        tokenizer: PreTrainedTokenizerBase,
        rows: RLHFDataset,
        data_hash: str,
        roles: Roles,
        observer: RunObserver,
    ) -> None:
        """`data_hash` identifies the committed `rows`; a checkpoint with other rows is rejected."""
        self.config, self.store, self.roles, self.observer = config, store, roles, observer
        self.ledger = Ledger(store)
        saving = config.trainer
        self.checkpointer = Checkpointer(store, roles, saving.keep_checkpoints, saving.save_every, observer)
        weights = [source.weight for source in config.data.sources]
        loader = StatefulLoader(rows.sizes, config.data.train_batch_size, config.trainer.seed, data_hash, weights)
        self.queue = RolloutQueue(config, rows, loader, roles)
        self.sampler = Sampler(config, self.queue, tokenizer)
        algorithm = config.algorithm
        self.kl_controller = KLController(
            algorithm.kl_controller, algorithm.kl_in_reward_coef, algorithm.kl_target, algorithm.kl_horizon
        )
        self.step, self.on_gpu = 0, resolve_device(config.trainer) == "cuda"

    def start(self, model_path: str) -> None:
        """Loads the policy and the newest valid checkpoint, if any, then pushes the weights to the engines."""
        self.roles.init_models(model_path, mini_batches(self.config))
        self.step = 0
        if found := self.checkpointer.recover():
            self.step, meta = found
            self.checkpointer.load(self.step)
            self.kl_controller.coef = meta["kl_coef"]
        self.roles.rollout.push_weights(self.step)
        if found:
            self.queue.load_state_dict(meta[STATE_KEY], self.checkpointer.rollouts(self.step))

    def fit(self, until: int) -> None:
        """Trains up to step `until`, or until the observer requests a stop; all steps are committed on return.

        Raises TransientError for retryable failures (lost or hanging workers, storage, too many unscored responses),
        TrainingError if training cannot continue (repeated non-finite gradients, too few useful groups, wrong weights
        in the engines, a failed canary), InputError for a config or scorer that does not fit the batch, and WorkerError
        for an unexpected exception of a worker.
        """
        passes = self.config.actor.ppo_epochs + self.config.needs_critic * self.config.critic.ppo_epochs
        last, phase = self.step >= until, Phases()
        while not last:
            step = self.step + 1
            phase.on_begin = partial(self.observer.on_phase, step)
            batch, metrics = self._batch(step, phase)
            with phase("advantage"):
                rows = training_rows(batch, self.config, step)
            tokens = float((rows.batch["prompt_length"] + rows.batch["response_length"]).sum())
            with phase("commit"):
                self.checkpointer.finish(self.queue.saved(step))  # the previous checkpoint, written during the rollouts
            with self.checkpointer.replayable(step, batch, metrics):
                with phase("update"):
                    metrics |= self._update(batch, rows)
                    phase.count("update", tokens * passes)
                if self.on_gpu:
                    with phase("advantage"):
                        usage, trained = self.roles.actor.gpu_usage(), tokens * self.config.actor.ppo_epochs
                        metrics |= gpu_metrics(usage, trained, phase.seconds["update"])
                with phase("advantage"):
                    metrics |= mismatch(batch)
                with phase("rollout"):
                    self.queue.before_push()
                with phase("push"):
                    metrics["kl/canary"] = self.roles.rollout.push_weights(step)
            if step in self.config.trainer.profile_steps:
                with phase("profile"):
                    self.roles.write_profile(self.store, run_files.profile(step))
            with phase("commit"):
                write_rollouts(self.store, run_files.rollouts(step), batch)
                last = step == until or self.observer.should_stop()
                if last or self.checkpointer.is_due(step):
                    self.checkpointer.begin(step, self._meta(step))
            # Written before the manifest; the record counts once a manifest covers its step.
            record = {"step": step, "time": time.time(), "metrics": {**metrics, **phase.metrics(tokens)}}
            phase = Phases()
            with phase("record"):
                self.ledger.write(step, record)
                self.step = step
                self.observer.on_step(record)
        self.checkpointer.finish(self.queue.saved(self.step + 1))

    def _batch(self, step: int, phase: Phases) -> tuple[DataProto, Metrics]:
        """Rollouts of the step with scores, log-probs and advantages, and their metrics."""
        config, roles = self.config, self.roles
        if step in config.trainer.profile_steps:
            with phase("profile"):
                roles.start_profile()
        # With prefetched rollouts, which the checkpoint must contain, the step is repeated instead.
        with nullcontext() if config.max_staleness else self.checkpointer.kept():
            batch, metrics = self.sampler.batch(step, phase)
        if config.needs_critic or not log_probs_with_update(config):
            with phase("log_prob"):
                order = torch.tensor(balanced_order(batch, config))
                batch = batch.reorder(order)
                values = roles.critic.compute_values.submit(batch) if config.needs_critic else None
                if not log_probs_with_update(config):
                    batch = batch.union(roles.actor.compute_log_prob(batch))
                if config.needs_reference:
                    batch = batch.union(roles.actor.compute_ref_log_prob(batch))
                if values:
                    batch = batch.union(values.get())
                batch = batch.reorder(order.argsort())  # restore: mini-batches must not depend on the number of ranks
        with phase("advantage"):
            batch, shaping = apply_correction_and_kl(batch, config, self.kl_controller)
            batch = compute_advantages(batch, config)
            metrics |= shaping | batch_metrics(batch, config.multi_turn)
            self.kl_controller.update(metrics.get("kl/ref_k1", 0.0), len(batch))
        return batch, metrics

    def _update(self, batch: DataProto, rows: DataProto) -> Metrics:
        """Updates actor and critic on the training rows of the batch; adds the log-probs before the update to the batch
        if it lacks them."""
        config, roles = self.config, self.roles
        critic = roles.critic.update_critic.submit(rows) if config.needs_critic else None
        try:
            columns, metrics = roles.actor.update_actor(rows)
        except TrainingError:
            if log_probs_with_update(config):  # for a replay; a failed update has not changed the weights
                self._complete(batch, roles.actor.compute_log_prob(rows))
            raise
        self._complete(batch, columns)
        metrics = prefixed("actor", metrics)
        return metrics | prefixed("critic", critic.get()) if critic else metrics

    def _complete(self, batch: DataProto, columns: DataProto) -> None:
        """Adds columns in the order of the training rows to the batch; it has the same rows if there are any."""
        if columns:
            order = torch.tensor(balanced_order(batch, self.config))
            batch.batch |= columns[order.argsort()].batch

    def _meta(self, step: int) -> Json:
        return {"step": step, STATE_KEY: self.queue.state_dict(), "kl_coef": self.kl_controller.coef}


def prefixed(prefix: str, metrics: Metrics) -> Metrics:
    """Prefixes each metric's name with `prefix/`."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
