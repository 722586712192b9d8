"""Checkpoints: shards are written while training continues; the manifest follows once every rank is done."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rl_core.cluster.roles import Roles
from rl_core.data.protocol import DataProto, Metrics
from rl_core.errors import InputError, RollforwardError, TrainingError
from rl_core.storage import run_files
from rl_core.storage.files import join
from rl_core.storage.manifest import Json
from rl_core.storage.store import Store
from rl_core.trainer.failed_steps import forget_failures, keep_failure
from rl_core.trainer.observer import RunObserver

logger = logging.getLogger(__name__)

POLL = 0.1


class Checkpointer:
    """A run's checkpoints, begun and committed one at a time; only a committed one counts."""

    def __init__(self, store: Store, roles: Roles, keep: int, save_every: int, observer: RunObserver) -> None:
        """Saves every `save_every` steps and keeps the newest `keep` checkpoints."""
        self.store, self.roles, self.keep, self.save_every, self.observer = store, roles, keep, save_every, observer
        self._pending: tuple[int, Json] | None = None

    def recover(self) -> tuple[int, Json] | None:
        """Returns step and manifest `meta` of the newest valid checkpoint, or None.

        Deletes newer checkpoints that are damaged or uncommitted.
        """
        found = self.store.latest_valid_step(run_files.CHECKPOINTS, self.observer.on_damage)
        self._pending = None
        return (found[0], found[1]["meta"]) if found else None

    def load(self, step: int) -> None:
        """Loads the state of every role from a committed step."""
        self.roles.load_checkpoint(self.store, self._committed(step))

    def is_due(self, step: int) -> bool:
        """Whether the step has a checkpoint; the last step of a run always has one."""
        return step % self.save_every == 0

    def begin(self, step: int, meta: Json) -> None:
        """Starts writing the current state of all roles; training may continue once this returns."""
        # Files of an earlier attempt may remain if a listing was stale.
        self.store.remove(run_files.checkpoint(step))
        self.roles.save_checkpoint(self.store, self._own(step))
        self._pending = step, meta

    def rollouts(self, step: int) -> bytes | None:
        """The prefetched rollouts committed with a step; None if there are none."""
        name = f"{self._committed(step)}/{run_files.ROLLOUTS_AHEAD}"
        return self.store.read_bytes(name) if self.store.exists(name) else None

    def finish(self, rollouts: bytes | None = None) -> None:
        """Waits for the shards of the pending checkpoint, if any, and commits it by writing its manifest.

        `rollouts` are those of the next step, if they were sampled with older weights than this step's.
        """
        if self._pending is None:
            return
        folder, files = self._own(self._pending[0]), self.roles.finish_checkpoint()
        if rollouts is not None:
            files.append(self.store.add_bytes(rollouts, folder, run_files.ROLLOUTS_AHEAD))
        self._commit(files)

    def _own(self, step: int) -> str:
        """Folder with this process's files of a step's checkpoint."""
        return join(run_files.checkpoint(step), run_files.lease_folder(self.store.holder))

    def _committed(self, step: int) -> str:
        """Folder with the files of a step's committed checkpoint, which another process may have written."""
        folder = run_files.checkpoint(step)
        files = (self.store.read_manifest(folder) or {"files": []})["files"]
        within = {match[1] for file in files if (match := run_files.IN_LEASE.match(file["path"]))}
        return join(folder, max(within, default=""))

    def rescue(self, step: int, patience_s: float) -> None:
        """Commits the pending checkpoint if it is that of `step` and all its shards appear within `patience_s` seconds.

        Calls no worker, since workers may hang or be dead, and raises no RollforwardError: an uncommitted step is
        repeated.
        """
        if self._pending is None or self._pending[0] != step:
            return
        end, folder = time.monotonic() + patience_s, self._own(step)
        try:
            while (files := self.roles.written_files(self.store, folder)) is None:
                if time.monotonic() > end:
                    return
                time.sleep(POLL)
            self._commit(files)
        except RollforwardError as error:
            logger.warning("step %d was not committed: %s", step, error)

    def _commit(self, files: list[Json]) -> None:
        assert self._pending is not None
        step, meta = self._pending
        inside = run_files.lease_folder(self.store.holder)
        files = [{**file, "path": join(inside, file["path"])} for file in files]
        self.store.commit_folder(run_files.checkpoint(step), meta, files)
        self._pending = None
        self.store.prune(run_files.CHECKPOINTS, self.keep, newest=step)
        forget_failures(self.store, step)
        self.observer.on_commit(step)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Also commits the pending checkpoint if the block raises a non-retryable error.

        After a TransientError the next attempt repeats the step instead, since workers may be dead.
        """
        try:
            yield
        except (InputError, TrainingError):
            self.finish()
            raise

    @contextmanager
    def replayable(self, step: int, batch: DataProto, metrics: Metrics) -> Iterator[None]:
        """Stores the step's batch if the block raises, for `rollforward replay`."""
        try:
            yield
        except Exception as error:
            with suppress(RollforwardError):  # the storage itself may have failed
                keep_failure(self.store, step, batch, metrics, error)
            raise
