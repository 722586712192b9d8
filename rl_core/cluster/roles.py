"""The worker groups of a run: actor with reference, rollout engines, and optionally critic and reward model."""

from contextlib import suppress

from rl_core.cluster.dispatch import Layout
from rl_core.cluster.placement import Placement, end_attempts, reserve
from rl_core.cluster.resources import resource_pools, shares, worker_env
from rl_core.cluster.reward_model import RewardModelScores, RewardModelWorker
from rl_core.cluster.rollout_handle import ColocatedRollouts, Rollouts
from rl_core.cluster.rollout_pool import RolloutPool
from rl_core.cluster.training_workers import ActorRolloutRefWorker, CriticWorker
from rl_core.cluster.worker_group import RayWorkerGroup
from rl_core.config.schema import OptimConfig, RunConfig
from rl_core.errors import TransientError
from rl_core.storage.manifest import Json
from rl_core.storage.store import Store
from rl_core.training.sharded_checkpoint import FILES

ROLE_FOLDERS = ("actor", "critic")
"""Subfolders of a checkpoint with the state of the trained roles."""


def start_groups(placement: Placement, classes: list[type], config: RunConfig) -> list[RayWorkerGroup]:
    """Starts colocated groups of these worker classes in the background; `meet` waits for them."""
    return [
        RayWorkerGroup(
            placement,
            worker_class,
            (config,),
            worker_env(config.trainer),
            share,
            config.trainer.call_timeout_s,
            layout_of(config) if placement.pool.setting == "trainer" else None,
        )
        for worker_class, share in zip(classes, shares(len(classes)), strict=True)
    ]


def layout_of(config: RunConfig) -> Layout:
    """Layout of the training ranks: which share sequences and, if rollouts are colocated, engines."""
    engines = config.rollout.tensor_parallel_size if config.colocated else 1
    return Layout(config.world_size, config.fsdp.sequence_parallel_size, engines)


class Roles:
    """All worker groups of a run; they share one pool unless rollouts or reward model have their own."""

    reward_model: RayWorkerGroup | None = None
    pool: RolloutPool | None = None

    def __init__(self, config: RunConfig, run: str, wait: bool = True) -> None:
        """Ends earlier attempts of the run in the cluster, reserves the slots and starts the processes.

        Without `wait` they start in the background until `meet`. Ray must be running. Releases everything if it raises.
        """
        self.config, self.run = config, run
        classes: list[type] = [ActorRolloutRefWorker] + [CriticWorker] * config.needs_critic
        reward_model: list[type] = [RewardModelWorker] if config.reward.model.path else []
        try:
            reserved = reserve(resource_pools(config), run, config.trainer.call_timeout_s)
            placements = {placement.pool.setting: placement for placement in reserved}
            separate = "reward.model" in placements
            groups = start_groups(placements["trainer"], classes if separate else classes + reward_model, config)
            if "rollout" in placements:
                self.pool = RolloutPool(placements["rollout"], groups[0], config)
            if separate:
                groups += start_groups(placements["reward.model"], reward_model, config)
        except BaseException:
            self._release()
            raise
        self.groups = groups
        self.trained = groups[: len(classes)]
        self.actor = groups[0]
        if reward_model:
            self.reward_model = groups[-1]
        if wait:
            self.meet()

    def meet(self) -> None:
        """Waits until all processes have started and joined their groups; releases everything if it raises."""
        try:
            for group in self.groups:
                group.meet()
            if self.pool:
                self.pool.meet()
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        with suppress(TransientError):  # must not hide the original error; the next attempt ends the leftovers
            end_attempts(self.run)

    @property
    def rollout(self) -> Rollouts:
        """The rollout engines, on the actor's slots or in their own pool."""
        config = self.config
        return self.pool or ColocatedRollouts(self.actor, config.rollout_ranks // config.rollout.tensor_parallel_size)

    @property
    def critic(self) -> RayWorkerGroup:
        """The critic's group; exists only if the algorithm needs one."""
        return self.trained[1]

    def init_models(self, path: str, updates: int) -> None:
        """Loads the checkpoint at `path` into actor, critic and rollout pool, and the reward model from its own path.

        `updates` is the number of mini-batches of the run.
        """
        config = self.config
        updates_of_actor = updates * config.actor.ppo_epochs
        actor = self.actor.init_model.submit(path, config.actor.optim, updates_of_actor, config.needs_reference)
        if self.pool:
            self.pool.init_model(path)
        # The actor goes first, because its colocated rollout engine measures the free memory.
        actor.get()
        calls = [self.reward_model.init_model.submit()] if self.reward_model else []
        if config.needs_critic:
            optim = config.critic.optim
            calls.append(self.critic.init_model.submit(path, optim, updates * config.critic.ppo_epochs))
        for call in calls:
            call.get()

    @property
    def model_scores(self) -> RewardModelScores | None:
        """The reward model's contribution to scores; None without a reward model."""
        return RewardModelScores(self.reward_model, self.config.reward.model.weight) if self.reward_model else None

    def init_warm_start(self, path: str) -> None:
        """Loads the checkpoint at `path` into the actor, for supervised training on reference answers."""
        optim = OptimConfig(lr=self.config.warm_start.lr)
        self.actor.init_model(path, optim, self.config.warm_start.steps, False)

    def save_checkpoint(self, store: Store, folder: str) -> None:
        """Starts writing the state of every trained role into `folder`; training may continue once this returns."""
        for call in [group.save_checkpoint.submit(store, folder) for group in self.trained]:
            call.get()

    def finish_checkpoint(self) -> list[Json]:
        """Waits until every trained role has written its state; returns the manifest entries of all files."""
        calls = [group.finish_checkpoint.submit() for group in self.trained]
        return [entry for call in calls for entries in call.get() for entry in entries]

    def written_files(self, store: Store, folder: str) -> list[Json] | None:
        """Returns the manifest entries of all files, or None while a trained role has not written its state.

        Reads the store only and calls no worker.
        """
        names = [f"{folder}/{name}/{FILES}" for name in ROLE_FOLDERS[: len(self.trained)]]
        if not all(map(store.exists, names)):
            return None
        return [entry for name in names for entry in store.read_json(name)]

    def start_profile(self) -> None:
        """Starts profiling every trained role."""
        for call in [group.start_profile.submit() for group in self.trained]:
            call.get()

    def write_profile(self, store: Store, folder: str) -> None:
        """Ends profiling; every rank of a trained role writes its profile into `folder`."""
        for call in [group.write_profile.submit(store, folder) for group in self.trained]:
            call.get()

    def load_checkpoint(self, store: Store, folder: str) -> None:
        """Loads the state of every trained role from `folder`."""
        for call in [group.load_checkpoint.submit(store, folder) for group in self.trained]:
            call.get()

    def close(self) -> None:
        """Ends all processes and releases the slots."""
        end_attempts(self.run)
