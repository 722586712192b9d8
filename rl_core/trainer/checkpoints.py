"""Checkpoints: shards are written while training goes on, and the manifest follows when every rank is done."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rl_core.cluster.roles import Roles
from rl_core.data.protocol import DataProto, Metrics
from rl_core.errors import InputError, RollforwardError, TrainingError
from rl_core.storage import run_files
from rl_core.storage.store import Json, Store
from rl_core.trainer.failed_steps import forget_failures, keep_failure
from rl_core.trainer.observer import RunObserver

logger = logging.getLogger(__name__)

POLL = 0.1


class Checkpointer:
    """A run's checkpoints, begun and finished one at a time; only a finished one counts."""

    def __init__(self, store: Store, roles: Roles, keep: int, observer: RunObserver) -> None:
        """Keeps the newest `keep` checkpoints."""
        self.store, self.roles, self.keep, self.observer = store, roles, keep, observer
        self._begun: tuple[int, Json] | None = None

    def recover(self) -> tuple[int, Json] | None:
        """Number and manifest's `meta` of the newest sound checkpoint; what is damaged or unfinished is removed."""
        found = self.store.latest_valid_step(run_files.CHECKPOINTS, self.observer.on_damage)
        self._begun = None
        return (found[0], found[1]["meta"]) if found else None

    def load(self, step: int) -> None:
        """Every role takes over its state of a committed step."""
        self.roles.load_checkpoint(self.store, run_files.checkpoint(step))

    def begin(self, step: int, meta: Json) -> None:
        """Starts to write the state that all roles have now; they may train on as soon as this returns."""
        folder = run_files.checkpoint(step)
        self.store.remove(folder)  # of an attempt before, where a listing was stale: its files must not mix with these
        self.roles.save_checkpoint(self.store, folder)
        self._begun = step, meta

    def rollouts(self, step: int) -> bytes | None:
        """The rollouts ahead that were committed with a step, if there were any."""
        name = f"{run_files.checkpoint(step)}/{run_files.ROLLOUTS_AHEAD}"
        return self.store.read_bytes(name) if self.store.exists(name) else None

    def finish(self, rollouts: bytes | None = None) -> None:
        """Waits for the shards of the step that was begun, if any, and commits it by its manifest.

        `rollouts` are those of the next step, where they were made with earlier weights than the step's.
        """
        if self._begun is None:
            return
        folder, files = run_files.checkpoint(self._begun[0]), self.roles.finish_checkpoint()
        if rollouts is not None:
            files.append(self.store.add_bytes(rollouts, folder, run_files.ROLLOUTS_AHEAD))
        self._commit(files)

    def rescue(self, step: int, patience_s: float) -> None:
        """Commits what was begun, where that is `step`, if all its shards are there within `patience_s` seconds.

        Asks no worker, for they may hang or be gone, and never raises: without the commit the step is made again.
        """
        if self._begun is None or self._begun[0] != step:
            return
        end, folder = time.monotonic() + patience_s, run_files.checkpoint(step)
        try:
            while (files := self.roles.written_files(self.store, folder)) is None:
                if time.monotonic() > end:
                    return
                time.sleep(POLL)
            self._commit(files)
        except RollforwardError as error:
            logger.warning("step %d is not committed: %s", step, error)

    def _commit(self, files: list[Json]) -> None:
        assert self._begun is not None
        step, meta = self._begun
        self.store.commit_folder(run_files.checkpoint(step), meta, files)
        self._begun = None
        self.store.prune(run_files.CHECKPOINTS, self.keep, newest=step)
        forget_failures(self.store, step)
        self.observer.on_commit(step)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Finishes what was begun also when the block ends with an error that no retry cures.

        After a TransientError the next attempt makes the step again instead: workers may be gone.
        """
        try:
            yield
        except (InputError, TrainingError):
            self.finish()
            raise

    @contextmanager
    def replayable(self, step: int, batch: DataProto, metrics: Metrics) -> Iterator[None]:
        """Keeps what a step trains on when the block ends with an error, for `rollforward replay`."""
        try:
            yield
        except Exception as error:
            with suppress(RollforwardError):  # storage may be what has failed
                keep_failure(self.store, step, batch, metrics, error)
            raise
