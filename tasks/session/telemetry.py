"""Progress reports of a run: to the console, its folder, Prefect's pages and MLflow."""

import threading
import time
from typing import Any

from rl_core.console import Console, duration
from rl_core.errors import TransientError
from rl_core.evaluation.no_progress import FLAT_STEPS, flat_warning, is_flat
from rl_core.storage import run_files
from rl_core.storage.status import State, StatusWriter
from rl_core.trainer.observer import RunObserver
from tasks.prefect_server.artifacts import PrefectPages
from tasks.runs.hang_report import own_frames, write_hang_report
from tasks.runs.run import Run, committed_step
from tasks.runs.signals import GracefulStop
from tasks.tracking.run_tracking import RunTracking

RECENT = 10
"""Steps over which the time per step is averaged."""


class RunTelemetry(RunObserver):
    """Reports the progress of one run to the console, the status file, Prefect and MLflow."""

    def __init__(self, run: Run, tracking: RunTracking) -> None:
        self.run, self.config, self.store, self.tracking = run, run.composed.config, run.store, tracking
        self.pages = PrefectPages(run.name)
        self.console = Console(also=self.pages.log_line)
        self.status = StatusWriter(self.store, self.config.trainer.steps, committed_step(self.store))
        self.stopping = GracefulStop(self.config.trainer.grace_s, self.console.note)
        self._seconds: list[float] = []
        self._flat_steps = 0
        for key, (before, now) in run.changed_layout.items():
            self.console.note(
                f"{key} changed from {before} to {now} since the run started: results equal within rounding"
            )

    def warn(self, text: str, key: str = "") -> None:
        """Prints a warning and records it for the report, with its key if it has one."""
        self.console.note(f"! {text}")
        notes = self.store.read_json(run_files.NOTES) if self.store.exists(run_files.NOTES) else []
        self.store.write_json(run_files.NOTES, [*notes, {"time": time.time(), "text": text, "key": key or text}])

    def warn_once(self, text: str, key: str = "") -> None:
        """As `warn`, unless the run has recorded a warning with this key (without one: this text) before."""
        notes = self.store.read_json(run_files.NOTES) if self.store.exists(run_files.NOTES) else []
        if (key or text) not in [note.get("key", note["text"]) for note in notes]:
            self.warn(text, key)

    def on_damage(self, message: str) -> None:
        """Warns of a checkpoint that is skipped as damaged."""
        self.warn(message)

    def on_phase(self, step: int, phase: str) -> None:
        """Writes the phase to the status file."""
        self.status.phase(step, phase)

    def on_step(self, record: dict[str, Any]) -> None:
        """Prints the step and updates the status file and Prefect's progress bar."""
        step, total, metrics = record["step"], self.config.trainer.steps, record["metrics"]
        self._seconds = [*self._seconds[1 - RECENT :], metrics["time/step"]]
        mean = sum(self._seconds) / len(self._seconds)
        self.stopping.step_began(mean)
        self.status.update(step=step, phase="", seconds_per_step=mean, reward=metrics.get("reward/mean"))
        self._flat_steps = self._flat_steps + 1 if is_flat(metrics) else 0
        if self._flat_steps == FLAT_STEPS:
            self.warn_once(flat_warning(FLAT_STEPS, metrics), "flat steps")
        left = self.status.status.seconds_left
        self.console.step(step, total, metrics, left)
        self.pages.progress(step, total, f"step {step} of {total}, {duration(left)} left")

    def on_commit(self, step: int) -> None:
        """Sends the step to MLflow, unless that would slow training down."""
        self.tracking.flush_paced(step)

    def should_stop(self) -> bool:
        """Whether a signal has requested a stop after the current step."""
        return self.stopping.requested()

    def record_hang(self, why: str) -> str:
        """Writes the reason `why` and this process's stacks to a hang report below the home folder.

        Returns the file, or the error that prevented writing it.
        """
        try:
            return str(write_hang_report(self.run.home, self.run.name, self.status.status, why))
        except OSError as error:
            return f"not written: {error}"

    def on_hang(self, silent_s: float) -> None:
        """Reports that this process made no progress and is about to be killed."""
        doing, frames = self.status.status.doing, own_frames(threading.main_thread().ident or 0)
        why = f"no progress for {silent_s:.0f} s (trainer.stall_timeout_s): {doing}; this process hangs in {frames}"
        self.console.failure(TransientError(why))
        self.console.note(f"to resume: the same command with --run {self.run.name}")
        self.console.note(f"stacks: {self.record_hang(why)}")  # after the other lines: the disk may be what hangs
        self.status.close("failed", why)
        self.tracking.end("failed", flush=False)

    def close(self, state: State, why: str) -> None:
        """Records the state in which the run ended."""
        self.status.close(state, why if state == "failed" else "")
        self.tracking.end(state)
