"""Rollouts in the order of the data: those under way, and those that wait to be trained on."""

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
    """Which batch of which step, and the rows that it was made of."""

    step: int
    attempt: int
    indices: list[int]


class RolloutQueueState(TypedDict):
    """The position of the loader and the batches that were begun ahead of it."""

    loader: LoaderState
    ahead: list[BatchKey]


@dataclass
class PendingBatch:
    """A batch that was begun: its calls, and once it is there, its rollouts."""

    key: BatchKey
    calls: list[Any]
    rollouts: DataProto | None = None

    def get(self) -> DataProto:
        """The rollouts; where the greedy ones are needed, they follow the sampled ones."""
        if self.rollouts is None:
            self.rollouts = DataProto.concat([call.get() for call in self.calls])
        return self.rollouts


class RolloutQueue:
    """Makes each step's rollouts once, whole groups at a time, in the order in which the loader gives the rows.

    What was begun and is not trained yet is part of the state: after a crash it is made again, or, where its rollouts
    were saved, taken as it is.
    """

    def __init__(self, config: RunConfig, rows: RLHFDataset, loader: StatefulLoader, roles: Roles) -> None:
        self.config, self.rows, self.loader, self.roles = config, rows, loader, roles
        self.needs_greedy = "greedy_reward_B" in ESTIMATORS.resolve(config.algorithm.estimator).needs
        self._begun: dict[tuple[int, int], PendingBatch] = {}
        self._taken: PendingBatch | None = None

    def begin(self, step: int, attempt: int = 0) -> None:
        """Starts the rollouts of a batch, unless they were started before."""
        if (step, attempt) not in self._begun:
            self._submit({"step": step, "attempt": attempt, "indices": self.loader.next()})

    def take(self, step: int, attempt: int = 0) -> tuple[DataProto, DataProto | None]:
        """The sampled and, where they are needed, the greedy rollouts of a batch, which counts as trained from now."""
        self.begin(step, attempt)
        batch = self._begun[step, attempt]
        rollouts = batch.get()
        del self._begun[step, attempt]
        if attempt == 0:
            self._taken = batch
        sampled = self.config.data.train_batch_size * self.config.rollout.n
        return rollouts[:sampled], rollouts[sampled:] if self.needs_greedy else None

    def before_push(self) -> None:
        """Waits for what is under way, where no response may be of two versions."""
        if self.config.rollout.mode == "one_step_off":
            for batch in self._begun.values():
                batch.get()

    def saved(self, step: int) -> bytes | None:
        """The rollouts that a step trains on, waiting for them; None where nothing is made ahead."""
        batch = self._begun.get((step, 0), self._taken)
        if batch is None or batch.key["step"] != step or not self.config.max_staleness:
            return None
        rollouts = batch.get()
        return rollouts.select(rollouts.columns - self._prompts(batch.key)[0].columns).to_bytes()

    def state_dict(self) -> RolloutQueueState:
        """The loader's position and what was begun and not taken."""
        return {"loader": self.loader.state_dict(), "ahead": [batch.key for batch in self._begun.values()]}

    def load_state_dict(self, state: RolloutQueueState, saved: bytes | None) -> None:
        """Goes on at a saved position; `saved` are the rollouts of the first batch ahead. Weights must be served."""
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
        """The prompts to sample responses to, and where they are needed, those to answer greedily."""
        sampled = prompt_batch(self.rows, key["indices"], self.config, key["step"], key["attempt"])
        return [sampled, sampled[:: self.config.rollout.n]] if self.needs_greedy else [sampled]

    def _submit(self, key: BatchKey) -> None:
        temperatures = [self.config.rollout.temperature, 0.0]
        calls = [
            self.roles.rollout.submit(prompts, temperature)
            for prompts, temperature in zip(self._prompts(key), temperatures, strict=False)
        ]
        self._begun[key["step"], key["attempt"]] = PendingBatch(key, calls)
