"""Order of training rows, with a position that can be saved and restored."""

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import TypedDict

import numpy as np

from rl_core.errors import InputError

WINDOW = 1 << 20
"""Rows permuted at a time, 4 bytes each."""


class LoaderState(TypedDict):
    """Position of a StatefulLoader and the data it is valid for."""

    positions: list[int]
    seed: int
    sizes: list[int]
    weights: list[float]
    data_hash: str


class SourceOrder:
    """Endless order of one source's rows: each epoch is a new permutation determined by seed, source and epoch.

    An epoch is processed window by window. With C windows, window c holds the rows c, c + C, c + 2C, …, an even sample
    of all rows.
    """

    def __init__(self, rows: int, seed: int, number: int) -> None:
        self.rows, self.seed, self.number = rows, seed, number
        self.position = 0
        self._windows = -(-rows // WINDOW)
        self._loaded = (-1, -1)
        self._order = np.empty(0, dtype=np.int32)

    def next(self) -> int:
        """The next row."""
        epoch, offset = divmod(self.position, self.rows)
        self.position += 1
        for window in self._visits(epoch):
            size = len(range(window, self.rows, self._windows))
            if offset < size:
                break
            offset -= size
        if self._loaded != (epoch, window):
            # NumPy pads seeds with zeros: the first window of the first source has the stream of [seed, epoch].
            stream = np.random.default_rng([self.seed, epoch, window, self.number])
            self._order, self._loaded = stream.permutation(size).astype(np.int32), (epoch, window)
        return window + self._windows * int(self._order[offset])

    def _visits(self, epoch: int) -> list[int]:
        """The windows of an epoch in the order they are visited."""
        if self._windows == 1:
            return [0]
        origin = np.random.SeedSequence([self.seed, epoch, 0, self.number], spawn_key=(1,))
        order: list[int] = np.random.default_rng(origin).permutation(self._windows).tolist()
        return order


class StatefulLoader:
    """Endless batches of row indices over one source, or over a mixture with concatenated rows.

    The next prompt is taken from the source furthest behind its share of the prompts so far, so that counts stay close
    to the shares at any time. A source that reaches the end of an epoch continues with the next one, so each of its
    rows is used equally often.
    """

    def __init__(
        self, sizes: Sequence[int], batch_size: int, seed: int, data_hash: str, weights: Sequence[float] = (1.0,)
    ) -> None:
        """`sizes`: number of rows of each source; `weights`: relative share of the prompts of each source."""
        self.sizes, self.weights = list(sizes), list(weights)
        self.batch_size, self.seed, self.data_hash = batch_size, seed, data_hash
        if min(self.sizes) < 1:
            empty = self.sizes.index(0) + 1
            raise InputError(
                expected="at least one training row in each source",
                seen=f"no rows in source {empty} of {len(self.sizes)}",
                where="the data loader",
                fix="provide data with at least one row",
            )
        self._orders = [SourceOrder(rows, seed, number) for number, rows in enumerate(self.sizes)]
        self._starts = [0, *itertools.accumulate(self.sizes)]
        # Exact fractions, so that equal deficits compare as equal.
        self._shares = [Fraction(weight) / sum(map(Fraction, self.weights)) for weight in self.weights]

    def next(self) -> list[int]:
        """The next `batch_size` row indices."""
        return [self._next() for _ in range(self.batch_size)]

    def _next(self) -> int:
        turn = sum(order.position for order in self._orders) + 1
        deficits = [share * turn - order.position for share, order in zip(self._shares, self._orders, strict=True)]
        source = deficits.index(max(deficits))
        return self._starts[source] + self._orders[source].next()

    def state_dict(self) -> LoaderState:
        """Number of rows used so far of each source, and the data these positions refer to."""
        return {
            "positions": [order.position for order in self._orders],
            "seed": self.seed,
            "sizes": self.sizes,
            "weights": self.weights,
            "data_hash": self.data_hash,
        }

    def load_state_dict(self, state: LoaderState) -> None:
        """Continue at a saved position; raises InputError naming the changes if it belongs to other data."""
        now = self.state_dict()
        names = {
            "data_hash": "the contents of the data",
            "sizes": "the number of training rows",
            "weights": "the weights of data.mixture",
            "seed": "trainer.seed",
        }
        changed = [name for name in names if state.get(name) != now[name]]  # type: ignore[literal-required]
        if changed:
            raise InputError(
                "the data and order for which the position was saved: "
                + ", ".join(f"{name}={state.get(name)}" for name in changed),
                ", ".join(f"{name}={now[name]}" for name in changed)  # type: ignore[literal-required]
                + f" ({' and '.join(names[name] for name in changed)} changed)",
                "the saved position of the data loader",
                "restore the earlier data and seed, or start a new run",
            )
        for order, position in zip(self._orders, state["positions"], strict=True):
            order.position = int(position)
