"""PPOTrainer: the loop of reinforcement learning on the driver, from prompts to a committed step."""

import time
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl_core import steps
from rl_core.algorithms.advantages import gae, group_index, grpo
from rl_core.cluster.roles import Roles
from rl_core.config.schema import RunConfig
from rl_core.data.dataset import RLHFDataset
from rl_core.data.loader import StatefulLoader
from rl_core.data.protocol import DataProto
from rl_core.errors import TrainingError
from rl_core.ledger import Ledger
from rl_core.metrics import Metrics, Phases, batch_metrics, value_metrics
from rl_core.rewards.runner import RewardRunner
from rl_core.storage import Store, step_name

CHECKPOINTS = "checkpoints"


class PPOTrainer:
    """One run's training: it starts from the last committed step and commits every step that it makes."""

    def __init__(
        self,
        config: RunConfig,
        store: Store,
        tokenizer: PreTrainedTokenizerBase,
        rows: RLHFDataset,
        data_hash: str,
        roles: Roles,
        rewards: RewardRunner,
        on_step: Callable[[dict[str, Any]], None],
        on_commit: Callable[[int], None],
    ) -> None:
        """`on_step` gets each step's ledger record, `on_commit` the newest step that a checkpoint covers."""
        self.config, self.store, self.tokenizer, self.rows = config, store, tokenizer, rows
        self.roles, self.rewards, self.on_step, self.on_commit = roles, rewards, on_step, on_commit
        self.ledger = Ledger(store)
        self.loader = StatefulLoader(len(rows), config.data.train_batch_size, config.trainer.seed, data_hash)
        self.step = 0

    def start(self, model_path: str) -> None:
        """Loads the policy and, where there is one, the newest sound checkpoint; ends with the weights pushed."""
        updates = self.config.trainer.steps * (self.config.data.train_batch_size // self.config.mini_batch_size)
        self.roles.init_models(model_path, updates)
        self.step = 0
        latest = self.store.latest_verified(CHECKPOINTS)
        if latest is not None:
            self.step, manifest = latest
            self.roles.load_checkpoint(self.store, f"{CHECKPOINTS}/{step_name(self.step)}")
            self.loader.load_state_dict(manifest["meta"]["loader"])
        self.store.sweep(CHECKPOINTS, newest=self.step)
        self.roles.actor.push_weights(self.step)

    def fit(self, until: int) -> None:
        """Trains up to and including step `until`."""
        config, roles = self.config, self.roles
        while self.step < until:
            step, phase = self.step + 1, Phases()
            with phase("rollout"):
                prompts = steps.prompt_batch(self.rows, self.loader.next(), config, step)
                batch = roles.actor.generate_sequences(prompts, config.rollout.temperature)
                roles.actor.sleep_rollout()
                self._check_versions(batch, step)
            with phase("score"):
                batch = steps.score(batch, self.rewards, self.tokenizer, config, step)
                batch = batch.reorder(steps.balanced_order(batch, config))
            with phase("log_prob"):
                batch = batch.union(roles.actor.compute_log_prob(batch))
                if config.needs_reference:
                    batch = batch.union(roles.actor.compute_ref_log_prob(batch))
                if config.needs_critic:
                    batch = batch.union(roles.critic.compute_values(batch))
            with phase("advantage"):
                batch, metrics = self._advantages(batch)
            with phase("update"):
                if config.needs_critic:
                    metrics |= prefixed("critic", roles.critic.update_critic(batch))
                metrics |= prefixed("actor", roles.actor.update_actor(batch))
            with phase("push"):
                metrics["kl/canary"] = max(roles.actor.push_weights(step))
            save = step % config.trainer.save_every == 0 or step == until
            with phase("commit"):
                self.store.write_bytes(f"rollouts/{step_name(step)}.parquet", steps.rollout_parquet(batch))
                if save:
                    roles.save_checkpoint(self.store, f"{CHECKPOINTS}/{step_name(step)}")
            tokens = float((batch.batch["prompt_length"] + batch.batch["response_length"]).sum())
            self._commit(step, {**metrics, **phase.metrics(tokens)}, save)
            self.step = step

    def _check_versions(self, batch: DataProto, step: int) -> None:
        served = set(batch.batch["version"].tolist())
        if served != {step - 1}:
            raise TrainingError(f"step {step} needs rollouts of weights version {step - 1}, the engine served {served}")

    def _advantages(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        tensors, mask_BR = batch.batch, batch.batch["response_mask"]
        batch, metrics = steps.apply_kl(batch, self.config.algorithm.kl_in_reward_coef)
        group_B = group_index(list(batch.non_tensor_batch["uid"]))
        if self.config.needs_critic:
            algorithm = self.config.algorithm
            advantages_BR, returns_BR = gae(
                batch.batch["token_level_rewards"], tensors["values"], mask_BR, algorithm.gamma, algorithm.lam
            )
            metrics |= value_metrics(tensors["values"], returns_BR, mask_BR)
        else:
            advantages_BR, returns_BR = grpo(batch.batch["token_level_rewards"], mask_BR, group_B)
        batch = batch.union(DataProto({"advantages": advantages_BR, "returns": returns_BR}, {}, {}))
        return batch, {**batch_metrics(batch, group_B), **metrics}

    def _commit(self, step: int, metrics: Metrics, save: bool) -> None:
        """The record first, the checkpoint's manifest last: a record counts once a manifest covers its step."""
        record = {"step": step, "time": time.time(), "metrics": metrics}
        self.ledger.write(step, record)
        if save:
            meta = {"step": step, "loader": self.loader.state_dict()}
            self.store.commit_folder(f"{CHECKPOINTS}/{step_name(step)}", meta)
            self.store.retain(CHECKPOINTS, self.config.trainer.keep_checkpoints)
            self.on_commit(step)
        self.on_step(record)


def prefixed(prefix: str, metrics: Metrics) -> Metrics:
    """The metrics under `prefix/`."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
