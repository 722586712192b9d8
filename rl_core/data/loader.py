"""The order in which training rows are used, as a position that can be saved and restored."""

from typing import TypedDict

import numpy as np

from rl_core.errors import InputError


class LoaderState(TypedDict):
    consumed: int
    seed: int
    rows: int
    data_hash: str


class StatefulLoader:
    """Endless batches of row indices: each epoch is a fresh permutation that follows from seed and epoch alone.

    A batch that reaches the end of an epoch is filled from the next one, so every row is used equally often.
    """

    def __init__(self, rows: int, batch_size: int, seed: int, data_hash: str) -> None:
        self.rows, self.batch_size, self.seed, self.data_hash = rows, batch_size, seed, data_hash
        if rows < 1:
            raise InputError("at least 1 training row", "none", "the data loader", "give data with at least one row")
        self.consumed = 0
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    @property
    def epoch(self) -> int:
        """Epochs completed so far."""
        return self.consumed // self.rows

    def next(self) -> list[int]:
        """The next `batch_size` row indices."""
        batch: list[int] = []
        while len(batch) < self.batch_size:
            epoch, offset = divmod(self.consumed, self.rows)
            part = self._permutation(epoch)[offset : offset + self.batch_size - len(batch)]
            batch += part.tolist()
            self.consumed += len(part)
        return batch

    def state_dict(self) -> LoaderState:
        """Rows used so far and what the position refers to."""
        return {"consumed": self.consumed, "seed": self.seed, "rows": self.rows, "data_hash": self.data_hash}

    def load_state_dict(self, state: LoaderState) -> None:
        """Continue at a saved position; raises InputError naming what changed when it was of other data."""
        now = self.state_dict()
        names = {"data_hash": "the data's contents", "rows": "the number of training rows", "seed": "trainer.seed"}
        changed = [name for name in names if state.get(name) != now[name]]  # type: ignore[literal-required]
        if changed:
            raise InputError(
                "the same data and order as when the position was saved: "
                + ", ".join(f"{name}={state.get(name)}" for name in changed),
                ", ".join(f"{name}={now[name]}" for name in changed)  # type: ignore[literal-required]
                + f" ({' and '.join(names[name] for name in changed)} changed)",
                "the saved position of the data loader",
                "restore the earlier data and seed, or start a new run",
            )
        self.consumed = int(state["consumed"])

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.rows)
            self._epoch = epoch
        return self._order
