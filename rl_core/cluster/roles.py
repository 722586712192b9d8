"""The worker groups of a run: actor with rollout and reference, and where the algorithm needs one, the critic."""

from rl_core.cluster.resources import resource_pool, worker_env
from rl_core.cluster.worker_group import Placement, RayWorkerGroup
from rl_core.cluster.workers import ActorRolloutRefWorker, CriticWorker
from rl_core.config.schema import OptimConfig, RunConfig
from rl_core.storage import Store


class Roles:
    """All worker groups of one run, colocated on one pool."""

    def __init__(self, config: RunConfig) -> None:
        """Reserves the places and starts the processes; Ray must be running."""
        self.config = config
        pool, deadline = resource_pool(config.trainer), config.trainer.call_timeout_s
        self.placement = Placement(pool, deadline)
        classes = [ActorRolloutRefWorker] + [CriticWorker] * config.needs_critic
        groups = [
            RayWorkerGroup(
                pool, self.placement.group, worker, (config,), worker_env(config.trainer), 1 / len(classes), deadline
            )
            for worker in classes
        ]
        self.groups = groups
        self.actor = groups[0]

    @property
    def critic(self) -> RayWorkerGroup:
        """The critic's group; only where the algorithm needs one."""
        return self.groups[1]

    def init_models(self, path: str, updates: int) -> None:
        """Loads the checkpoint at `path` into every role; `updates` is the number of mini-batches in the run."""
        config = self.config
        self.actor.init_model(path, config.actor.optim, updates * config.actor.ppo_epochs, config.needs_reference)
        if config.needs_critic:
            self.critic.init_model(path, config.critic.optim, updates * config.critic.ppo_epochs)

    def init_warm_start(self, path: str) -> None:
        """Loads the checkpoint at `path` into the actor, to be trained on reference answers."""
        optim = OptimConfig(lr=self.config.warm_start.lr)
        self.actor.init_model(path, optim, self.config.warm_start.steps, False)

    def save_checkpoint(self, store: Store, folder: str) -> None:
        """Every role starts to write its present state into `folder`, and may be trained on when this returns."""
        for group in self.groups:
            group.save_checkpoint(store, folder)

    def finish_checkpoint(self) -> None:
        """Waits until every role has written its state; committing the folder is the caller's."""
        for group in self.groups:
            group.finish_checkpoint()

    def load_checkpoint(self, store: Store, folder: str) -> None:
        """Every role takes over its state from `folder`."""
        for group in self.groups:
            group.load_checkpoint(store, folder)

    def close(self) -> None:
        """Ends all processes and gives the places back."""
        for group in self.groups:
            group.close()
        self.placement.close()
