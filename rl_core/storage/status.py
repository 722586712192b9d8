"""Current status of a run: one small file in its store, written by a thread so that training never waits for it."""

import logging
import os
import socket
import threading
import time
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rl_core.errors import RollforwardError
from rl_core.runtime.process import Process
from rl_core.runtime.watchdog import progress
from rl_core.storage import run_files
from rl_core.storage.store import Store

logger = logging.getLogger(__name__)

BEAT_S = 5.0
"""Interval at which the file is written even without changes."""
LEAST_S = 1.0
"""Minimum time between two writes: phases of a small model change every few milliseconds."""
SILENT_S = 60.0
"""Time without an update after which a process on another machine counts as dead."""

State = Literal["running", "finished", "stopped", "failed"]

WAITS = {
    "rollout": "the trainer waits for responses of the rollout engines",
    "score": "the trainer waits for scores",
    "log_prob": "the trainer waits for the workers' log-probs and values",
    "advantage": "the trainer computes advantages",
    "update": "the trainer waits for the workers' optimizer updates",
    "push": "the rollout engines wait for the new weights",
    "commit": "the trainer waits for storage",
    "record": "the trainer logs the step",
    "profile": "the trainer waits for the workers' profiles",
}
"""Description of each phase of a step."""


class Status(BaseModel):
    """Snapshot of a run's process; times are seconds since the epoch, `step` is the number of completed steps."""

    model_config = ConfigDict(frozen=True)

    state: State = "running"
    stage: str = ""
    stage_since: float = 0.0
    phase: str = ""
    phase_since: float = 0.0
    step: int = 0
    steps: int = 0
    seconds_per_step: float = 0.0
    reward: float | None = None
    pid: int = 0
    started: str = ""
    host: str = ""
    beat: float = 0.0
    error: str = ""

    @property
    def lives(self) -> bool:
        """Whether the process that wrote this is alive, as far as this machine can determine."""
        if self.host != socket.gethostname() or not self.started:  # earlier versions did not record the start
            return time.time() - self.beat < SILENT_S
        return Process(self.pid, self.started).find() is not None

    @property
    def state_now(self) -> State:
        """The actual state: `stopped` if the process died without recording how it ended."""
        return "stopped" if self.state == "running" and not self.lives else self.state

    @property
    def doing(self) -> str:
        """Current stage and phase: `stage train, step 3: the trainer waits for scores, since 14:02:11`."""
        where = f"stage {self.stage or 'none'}"
        if self.phase:
            where += f", step {self.step + 1}: {WAITS.get(self.phase, self.phase)}"
        since = time.localtime(self.phase_since if self.phase else self.stage_since or self.beat)
        return f"{where}, since {time.strftime('%H:%M:%S', since)}"

    @property
    def seconds_left(self) -> float:
        """Estimated time for the remaining steps at the current rate."""
        return (self.steps - self.step) * self.seconds_per_step


def read_status(store: Store) -> Status | None:
    """The last status written by the run's process; None if there is none or it is unreadable."""
    try:
        return Status.model_validate_json(store.read_bytes(run_files.STATUS))
    except (FileNotFoundError, ValidationError):
        return None


class StatusWriter:
    """Writes the status file of this process's run until `close`.

    An update costs the caller microseconds. If storage fails, the file becomes outdated and one warning is logged.
    """

    def __init__(self, store: Store, steps: int, step: int) -> None:
        """`step` of `steps` steps are completed."""
        self._store = store
        self.status = Status(
            steps=steps, step=step, pid=os.getpid(), started=Process.of(os.getpid()).started, host=socket.gethostname()
        )
        self._changed, self._ended = threading.Event(), threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._keep, name="status", daemon=True)
        self._write()
        self._thread.start()

    def update(self, **changes: Any) -> None:
        """Updates the given status fields."""
        progress()
        self.status = self.status.model_copy(update=changes)
        self._changed.set()

    def stage(self, name: str) -> None:
        """Records the start of a stage."""
        now = time.time()
        self.update(stage=name, stage_since=now, phase="", phase_since=now)

    def phase(self, step: int, name: str) -> None:
        """Records the start of a phase of a step."""
        self.update(step=step - 1, phase=name, phase_since=time.time())

    def close(self, state: State, error: str = "") -> None:
        """Stops the thread and writes the final state."""
        self._ended.set()
        self._changed.set()
        self._thread.join()
        self.update(state=state, phase="", error=error)
        self._write()

    def _keep(self) -> None:
        while not self._ended.wait(LEAST_S):
            self._changed.wait(BEAT_S)
            self._changed.clear()
            self._write()

    def _write(self) -> None:
        try:
            text = self.status.model_copy(update={"beat": time.time()}).model_dump_json()
            self._store.write_bytes(run_files.STATUS, text.encode())
        except (RollforwardError, FileNotFoundError) as error:
            if not self._warned:
                logger.warning("The status file could not be written; `rollforward status` is outdated. %s", error)
            self._warned = True
