"""Worker groups and trainer of a run: started when a stage first needs them, stopped before a retry."""

import os
from contextlib import ExitStack, suppress
from pathlib import Path

from rl_core.cluster.local_ray import LocalRay
from rl_core.cluster.resources import ray_session
from rl_core.cluster.roles import Roles
from rl_core.config.schema import RunConfig
from rl_core.errors import RollforwardError, TrainingError
from rl_core.models.load import check_shape, same_shape
from rl_core.storage import run_files
from rl_core.storage.store import Store
from rl_core.trainer.observer import RunObserver
from rl_core.trainer.trainer import PPOTrainer
from tasks.runs.run import Run, committed_step
from tasks.session.assets import RunAssets


def start_ray(config: RunConfig, home: Path, store: Store) -> LocalRay | None:
    """A local Ray, starting in the background, for a run that has steps to train; None if it has a cluster."""
    if "RAY_ADDRESS" in os.environ or committed_step(store) >= config.trainer.steps:
        return None
    return LocalRay(home, config.slots)


class RunWorkers:
    """Ray, the worker groups and the trainer of one run."""

    def __init__(
        self, run: Run, assets: RunAssets, observer: RunObserver, verbose: bool, local_ray: LocalRay | None = None
    ) -> None:
        """Starts no worker. `verbose` shows the output of the workers. The first workers run in `local_ray`, a Ray that
        is starting already."""
        self.run, self.config, self.assets, self.observer = run, run.composed.config, assets, observer
        self._verbose = verbose
        self._resources = ExitStack()
        self._local_ray = local_ray
        self._starting: Roles | None = None
        self._roles: Roles | None = None
        self._trainer: PPOTrainer | None = None

    def begin(self) -> None:
        """Starts the workers in the background if Ray has been started for them."""
        if self._local_ray and not self._starting:
            self._launch()

    def start(self) -> Roles:
        """The worker groups; starts Ray and the workers if they are not running."""
        if self._roles is None:
            roles = self._starting or self._launch()
            roles.meet()
            self._roles = roles
        return self._roles

    def _launch(self) -> Roles:
        local, self._local_ray = self._local_ray, None
        self._resources.enter_context(ray_session(self.run.home, self.config.slots, self._verbose, local))
        self.run.lease.check()  # another process may have taken the run over, with workers of its own
        self._starting = Roles(self.config, self.run.url, wait=False)
        self._resources.callback(self._close, self._starting)
        return self._starting

    def _close(self, roles: Roles) -> None:
        if "RAY_ADDRESS" not in os.environ:  # all processes of a local Ray are killed next
            return
        with suppress(RollforwardError):  # if the lease is lost or storage is down, Ray ends this process's workers
            self.run.lease.check()
            roles.close()

    def start_trainer(self) -> PPOTrainer:
        """The trainer; starts it at the last committed step if it is not running."""
        if self._trainer is None:
            assets, manifest = self.assets, self.run.store.read_manifest(run_files.DATA)
            assert manifest is not None, "prepare_data must run before training"
            trainer = PPOTrainer(
                self.config,
                self.run.store,
                assets.tokenizer,
                assets.train_rows,
                manifest["meta"]["data_hash"],
                self.start(),
                self.observer,
            )
            trainer.start(str(assets.fetch_policy_model()))
            self._trainer = trainer
        return self._trainer

    def train_to(self, step: int) -> Roles:
        """The worker groups with the policy of a committed step; steps with damaged checkpoints are trained again.

        Raises TrainingError if training is already beyond that step.
        """
        trainer = self.start_trainer()
        if trainer.step > step:
            raise TrainingError(f"the policy of step {step} is needed, but training is at step {trainer.step}")
        if trainer.step < step:
            trainer.fit(step)
        return self.start()

    def load_model(self, folder: Path) -> Roles:
        """The worker groups with another model, restarted if its shape differs; discards the trainer.

        Raises InputError if the model's context is too short for the rows.
        """
        check_shape(folder, self.config.max_length, self.config.rollout.tensor_parallel_size)
        if not same_shape(folder, self.assets.fetch_policy_model()):
            self.drop()
        self._trainer = None
        roles = self.start()
        roles.init_models(str(folder), 1)
        roles.rollout.push_weights(0)
        return roles

    def drop(self, patience_s: float = 0.0) -> None:
        """Stops the workers and Ray; the next stage that needs them restarts them from the last commit.

        A finished step is committed first if all its shards are written within `patience_s` seconds, except in a run
        with rollouts ahead of training: only the workers may have the rollouts that the step depends on.
        """
        if self._trainer and not self.config.max_staleness:
            self._trainer.checkpointer.rescue(self._trainer.step, patience_s)
        self._trainer = self._roles = self._starting = None
        self.assets.forget()
        if self._local_ray:  # never used
            self._resources.callback(self._local_ray.stop)
            self._local_ray = None
        self._resources.close()
