"""Settings of the training loop: length, placement, checkpoints and timeouts."""

from typing import Annotated, Literal

from pydantic import Field

from rl_core.config.learning import MAX_COUNT, MAX_PROCESSES, MAX_SECONDS, Section

STALL_SLACK_S = 600.0
"""Seconds allowed between a call to the workers and the next progress, for example for an upload to the registry."""


class TrainerConfig(Section):
    """Length, placement and run control of training."""

    steps: int = Field(100, ge=1, le=MAX_COUNT)
    """Reinforcement-learning steps of the run."""
    segment_steps: int = Field(50, ge=1, le=MAX_COUNT)
    """Steps per task run of the train stage."""
    save_every: int = Field(1, ge=1, le=MAX_COUNT)
    """Steps per checkpoint; a crash repeats at most this many steps."""
    keep_checkpoints: int = Field(2, ge=1, le=MAX_COUNT)
    """Number of newest checkpoints to keep."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Seed of data order, initial weights and sampling."""
    nodes: int = Field(1, ge=1, le=100_000)
    """Machines of the Ray cluster to use."""
    ranks_per_node: int = Field(1, ge=1, le=MAX_PROCESSES)
    """Worker processes per machine: one per GPU, or any number on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of training and rollouts; auto uses CUDA if a GPU is available."""
    threads_per_rank: int = Field(1, ge=1, le=MAX_PROCESSES)
    """CPU threads per worker process; results are bit-identical only with the same number."""
    profile_steps: tuple[Annotated[int, Field(ge=1, le=MAX_COUNT)], ...] = ()
    """Steps to profile: each training rank writes a trace of torch's profiler into the run's folder `profile`, and on
    CUDA a snapshot of its memory. Such a step is slower."""
    call_timeout_s: float = Field(3600.0, gt=0, le=MAX_SECONDS)
    """Maximum seconds per call to the workers; then the stage is retried with new workers."""
    stall_timeout_s: float | None = Field(None, gt=0, le=MAX_SECONDS)
    """Maximum seconds without progress in the run's main process; then it exits with code 1. Unset:
    trainer.call_timeout_s + 600."""
    grace_s: float = Field(20.0, ge=0, le=MAX_SECONDS)
    """Maximum seconds for the current step to finish after SIGINT or SIGTERM; 0 abandons it at once."""
    max_attempts: int = Field(3, ge=1, le=1000)
    """Attempts per stage if workers are lost or storage fails."""

    @property
    def silence_s(self) -> float:
        """Seconds without progress after which the run's main process exits."""
        return self.stall_timeout_s or self.call_timeout_s + STALL_SLACK_S
