"""Commits of steps: shards are written while training goes on, and the manifest follows when every rank is done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rl_core.cluster.roles import Roles
from rl_core.errors import InputError, TrainingError
from rl_core.storage import Json, Store, step_name

CHECKPOINTS = "checkpoints"
ROLLOUTS = "rollouts.safetensors"


class Commits:
    """A run's checkpoints, begun and finished one at a time; only a finished one counts."""

    def __init__(self, store: Store, roles: Roles, keep: int, on_commit: Callable[[int], None]) -> None:
        """Keeps the newest `keep`; `on_commit` gets each step that is committed."""
        self.store, self.roles, self.keep, self.on_commit = store, roles, keep, on_commit
        self._begun: tuple[int, Json] | None = None

    def recover(self) -> tuple[int, Json] | None:
        """Number and manifest's `meta` of the newest sound checkpoint; everything newer or unfinished is removed."""
        found = self.store.latest_verified(CHECKPOINTS)
        self.store.sweep(CHECKPOINTS, newest=found[0] if found else 0)
        self._begun = None
        return (found[0], found[1]["meta"]) if found else None

    def load(self, step: int) -> None:
        """Every role takes over its state of a committed step."""
        self.roles.load_checkpoint(self.store, f"{CHECKPOINTS}/{step_name(step)}")

    def begin(self, step: int, meta: Json) -> None:
        """Starts to write the state that all roles have now; they may train on as soon as this returns."""
        self.roles.save_checkpoint(self.store, f"{CHECKPOINTS}/{step_name(step)}")
        self._begun = step, meta

    def rollouts(self, step: int) -> bytes | None:
        """The rollouts ahead that were committed with a step, if there were any."""
        name = f"{CHECKPOINTS}/{step_name(step)}/{ROLLOUTS}"
        return self.store.read_bytes(name) if self.store.exists(name) else None

    def finish(self, rollouts: bytes | None = None) -> None:
        """Waits for the shards of the step that was begun, if any, and commits it by its manifest.

        `rollouts` are those of the next step, where they were made with earlier weights than the step's.
        """
        if self._begun is None:
            return
        (step, meta), self._begun = self._begun, None
        self.roles.finish_checkpoint()
        if rollouts is not None:
            self.store.write_bytes(f"{CHECKPOINTS}/{step_name(step)}/{ROLLOUTS}", rollouts)
        self.store.commit_folder(f"{CHECKPOINTS}/{step_name(step)}", meta)
        self.store.retain(CHECKPOINTS, self.keep)
        self.on_commit(step)

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
