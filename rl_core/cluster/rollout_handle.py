"""Interface to the rollout engines for trainer, sampler and evaluation, independent of their placement."""

from typing import Protocol

from rl_core.cluster.worker_group import RayWorkerGroup
from rl_core.data.protocol import DataProto


class RolloutCall(Protocol):
    """Handle of rollouts in flight."""

    def get(self) -> DataProto:
        """Waits for the responses; rows are in the order of the prompts."""
        ...


class Rollouts(Protocol):
    """The rollout engines of a run."""

    redispatched: int
    """Number of rows that were sent again because their engine was lost."""

    @property
    def engines(self) -> int:
        """Number of live engines."""
        ...

    def push_weights(self, version: int) -> float:
        """Pushes the actor's weights to all engines; returns the canary's largest log-prob difference.

        Raises TrainingError if an engine and the actor disagree about fixed tokens.
        """
        ...

    def submit(self, prompts: DataProto, temperature: float) -> RolloutCall:
        """Starts rollouts of the columns `prompt_ids` and `seed`, at a temperature (0: greedy)."""
        ...

    def generate_sequences(self, prompts: DataProto, temperature: float) -> DataProto:
        """Like `submit`, and waits for the responses."""
        ...

    def sleep(self) -> None:
        """Releases memory shared with the actor to training, until the next push."""
        ...


class ColocatedRollouts:
    """Rollout engines on the actor's slots: they share its lifetime and alternate with training."""

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
