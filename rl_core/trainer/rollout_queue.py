"""Queue of rollouts in the order of the data: batches in flight, and finished ones not trained yet."""

from dataclasses import dataclass
from typing import Any, TypedDict

from rl_core.algorithms.advantages import ESTIMATORS
from rl_core.cluster.roles import Roles
from rl_core.config.schema import RunConfig
from rl_core.data.dataset import RLHFDataset
from rl_core.data.loader import LoaderState, StatefulLoader
from rl_core.data.protocol import DataProto
from rl_core.trainer.batch import prompt_batch

STATE_KEY = "upcoming"
"""Key of the queue's state in a checkpoint's manifest."""


class BatchKey(TypedDict):
    """Identity of a batch: its step, the attempt of dynamic sampling, and the indices of its rows."""

    step: int
    attempt: int
    indices: list[int]


class RolloutQueueState(TypedDict):
    """Position of the loader, and the batches begun but not trained."""

    loader: LoaderState
    ahead: list[BatchKey]


@dataclass
class PendingBatch:
    """A submitted batch: its calls and, once finished, its rollouts."""

    key: BatchKey
    calls: list[Any]
    rollouts: DataProto | None = None

    def get(self) -> DataProto:
        """Waits for the rollouts; greedy ones, if needed, follow the sampled ones."""
        if self.rollouts is None:
            self.rollouts = DataProto.concat([call.get() for call in self.calls])
        return self.rollouts


class RolloutQueue:
    """Generates each step's rollouts once, in whole groups and in the loader's order of rows.

    Batches begun but not trained yet are part of the state: after a crash they are generated again, or restored if
    their rollouts were saved.
    """

    def __init__(self, config: RunConfig, rows: RLHFDataset, loader: StatefulLoader, roles: Roles) -> None:
        self.config, self.rows, self.loader, self.roles = config, rows, loader, roles
        self.needs_greedy = "greedy_reward_B" in ESTIMATORS.resolve(config.algorithm.estimator).needs
        self._begun: dict[tuple[int, int], PendingBatch] = {}
        self._taken: PendingBatch | None = None

    def begin(self, step: int, attempt: int = 0) -> None:
        """Starts the rollouts of a batch unless they have been started already."""
        if (step, attempt) not in self._begun:
            self._submit({"step": step, "attempt": attempt, "indices": self.loader.next()})

    def take(self, step: int, attempt: int = 0) -> tuple[DataProto, DataProto | None]:
        """Returns the sampled and, if needed, the greedy rollouts of a batch; it counts as trained from now on."""
        self.begin(step, attempt)
        batch = self._begun[step, attempt]
        rollouts = batch.get()
        del self._begun[step, attempt]
        if attempt == 0:
            self._taken = batch
        sampled = self.config.data.train_batch_size * self.config.rollout.n
        return rollouts[:sampled], rollouts[sampled:] if self.needs_greedy else None

    def before_push(self) -> None:
        """In mode `one_step_off`, waits for batches in flight so that no response mixes two weights versions."""
        if self.config.rollout.mode == "one_step_off":
            for batch in self._begun.values():
                batch.get()

    def saved(self, step: int) -> bytes | None:
        """Waits for the rollouts of a step and returns them serialised; None if rollouts are not prefetched."""
        batch = self._begun.get((step, 0), self._taken)
        if batch is None or batch.key["step"] != step or not self.config.max_staleness:
            return None
        rollouts = batch.get()
        return rollouts.select(rollouts.columns - self._prompts(batch.key)[0].columns).to_bytes()

    def state_dict(self) -> RolloutQueueState:
        """Loader position and the batches begun but not taken."""
        return {"loader": self.loader.state_dict(), "ahead": [batch.key for batch in self._begun.values()]}

    def load_state_dict(self, state: RolloutQueueState, saved: bytes | None) -> None:
        """Resumes at a saved position; `saved` are the rollouts of the first batch. The engines must serve weights."""
        self.loader.load_state_dict(state["loader"])
        self._begun.clear()
        for i, key in enumerate(state["ahead"]):
            if saved and i == 0:
                prompts = DataProto.concat(self._prompts(key))
                self._begun[key["step"], key["attempt"]] = PendingBatch(
                    key, [], prompts.union(DataProto.from_bytes(saved))
                )
            else:
                self._submit(key)

    def _prompts(self, key: BatchKey) -> list[DataProto]:
        """Prompts of the sampled responses and, if needed, of the greedy ones."""
        sampled = prompt_batch(self.rows, key["indices"], self.config, key["step"], key["attempt"])
        return [sampled, sampled[:: self.config.rollout.n]] if self.needs_greedy else [sampled]

    def _submit(self, key: BatchKey) -> None:
        temperatures = [self.config.rollout.temperature, 0.0]
        calls = [
            self.roles.rollout.submit(prompts, temperature)
            for prompts, temperature in zip(self._prompts(key), temperatures, strict=False)
        ]
        self._begun[key["step"], key["attempt"]] = PendingBatch(key, calls)
