"""What trainer, sampler and evaluation know of rollouts, wherever the engines are."""

from typing import Protocol

from rl_core.cluster.worker_group import RayWorkerGroup
from rl_core.data.protocol import DataProto


class RolloutCall(Protocol):
    """Rollouts that are under way."""

    def get(self) -> DataProto:
        """Waits for the responses; rows are in the order of the prompts."""
        ...


class Rollouts(Protocol):
    """The rollout engines of a run."""

    redispatched: int
    """Rows that were sent again because their engine had gone."""

    @property
    def engines(self) -> int:
        """Engines that live."""
        ...

    def push_weights(self, version: int) -> float:
        """Makes all engines serve the actor's weights; returns the canary's largest difference of log-probs.

        Raises TrainingError where an engine disagrees with the actor about fixed tokens.
        """
        ...

    def submit(self, prompts: DataProto, temperature: float) -> RolloutCall:
        """Starts rollouts of `prompt_ids` with `seed` per row, at a temperature (0 is greedy)."""
        ...

    def generate_sequences(self, prompts: DataProto, temperature: float) -> DataProto:
        """The same, and waits for them."""
        ...

    def sleep(self) -> None:
        """Gives memory that the engines share with the actor to training, until the next push."""
        ...


class ColocatedRollouts:
    """Rollout engines on the actor's places: they live and die with its group, and take turns with training."""

    redispatched = 0

    def __init__(self, actor: RayWorkerGroup, engines: int) -> None:
        self.actor, self.engines = actor, engines

    def push_weights(self, version: int) -> float:
        """See `Rollouts`."""
        differences: list[float] = self.actor.push_weights(version)
        return max(differences)

    def submit(self, prompts: DataProto, temperature: float) -> RolloutCall:
        """See `Rollouts`."""
        return self.actor.generate_sequences.submit(prompts, temperature)

    def generate_sequences(self, prompts: DataProto, temperature: float) -> DataProto:
        """See `Rollouts`."""
        return self.submit(prompts, temperature).get()

    def sleep(self) -> None:
        """See `Rollouts`."""
        self.actor.sleep_rollout()
