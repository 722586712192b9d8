"""Settings of the loop: how long, where, how often it is committed, and how long anything may take."""

from typing import Literal

from pydantic import Field

from rl_core.config.learning import Section

STALL_SLACK_S = 600.0
"""What may follow a call to the workers before there is progress again, such as an upload to the registry."""


class TrainerConfig(Section):
    """Length, ranks and run control of the training."""

    steps: int = Field(100, ge=1)
    """Steps of reinforcement learning in the run."""
    segment_steps: int = Field(50, ge=1)
    """Steps per task run of the train stage."""
    save_every: int = Field(1, ge=1)
    """Steps per checkpoint; a crash repeats at most this many steps."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints that are kept."""
    seed: int = Field(0, ge=0)
    """Seed of data order, initial weights and sampling."""
    nodes: int = Field(1, ge=1)
    """Machines of the Ray cluster to use."""
    ranks_per_node: int = Field(1, ge=1)
    """Worker processes per machine: one a GPU, or any number on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where training and rollouts run; auto takes CUDA where there is a GPU."""
    threads_per_rank: int = Field(1, ge=1)
    """CPU threads of each worker process; results are equal bit for bit only with the same number."""
    call_timeout_s: float = Field(3600.0, gt=0)
    """Longest wait, in seconds, for one call to the workers; then the stage is tried again with fresh ones."""
    stall_timeout_s: float | None = Field(None, gt=0)
    """Longest time, in seconds, in which the run's own process may get nowhere; then it ends with exit code 1. Unset
    is trainer.call_timeout_s and 600 more."""
    grace_s: float = Field(20.0, ge=0)
    """Longest time, in seconds, that a step under way may still take after SIGINT or SIGTERM; 0 abandons it at once."""
    max_attempts: int = Field(3, ge=1)
    """Tries of each stage when workers are lost or storage fails."""

    @property
    def silence_s(self) -> float:
        """Seconds without progress after which the run's own process ends."""
        return self.stall_timeout_s or self.call_timeout_s + STALL_SLACK_S
