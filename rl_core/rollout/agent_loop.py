"""The life of a trajectory: PENDING → RUNNING → COMPLETED or FAILED, over a rollout engine.

A single turn needs one call of the engine for a whole batch of trajectories.
"""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import torch

from rl_core.data.protocol import DataProto
from rl_core.rollout.engine import Completion, RolloutEngine, Sampling


class TrajectoryState(Enum):
    """Where a trajectory is in its life."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass
class Trajectory:
    """One conversation of the policy: its tokens and which of them the policy sampled."""

    prompt_ids: list[int]
    seed: int
    state: TrajectoryState = TrajectoryState.PENDING
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    stop_reason: str = ""
    version: int = -1

    def take(self, completion: Completion) -> None:
        """Adds a sampled turn."""
        self.response_ids += completion.token_ids
        self.response_mask += [1] * len(completion.token_ids)
        self.log_probs += completion.log_probs
        self.stop_reason, self.version = completion.stop_reason, completion.version
        self.state = TrajectoryState.COMPLETED if completion.token_ids else TrajectoryState.FAILED


def run_trajectories(engine: RolloutEngine, prompts: DataProto, sampling: Sampling) -> DataProto:
    """Responses to the rows' `prompt_ids` with the rows' `seed`, as the padded view of a batch.

    Adds `prompts` [B, P], `responses`, `response_mask`, `rollout_log_probs` [B, R], `prompt_length`,
    `response_length`, `version` [B], and `stop_reason`, `status` per row.
    """
    rows = prompts.non_tensor_batch
    trajectories = [
        Trajectory(list(ids), int(seed)) for ids, seed in zip(rows["prompt_ids"], rows["seed"], strict=True)
    ]
    for trajectory in trajectories:
        trajectory.state = TrajectoryState.RUNNING
    completions = engine.generate([t.prompt_ids for t in trajectories], [t.seed for t in trajectories], sampling)
    for trajectory, completion in zip(trajectories, completions, strict=True):
        trajectory.take(completion)
    return prompts.union(to_batch(trajectories, sampling.max_tokens))


def to_batch(trajectories: list[Trajectory], width: int) -> DataProto:
    """The padded view of trajectories; responses are padded to `width` tokens."""
    longest = max(len(t.prompt_ids) for t in trajectories)

    def padded(sequences: list[list], columns: int, dtype: torch.dtype) -> torch.Tensor:
        out = torch.zeros(len(sequences), columns, dtype=dtype)
        for row, sequence in zip(out, sequences, strict=True):
            row[: len(sequence)] = torch.tensor(sequence, dtype=dtype)
        return out

    batch = {
        "prompts": padded([t.prompt_ids for t in trajectories], longest, torch.long),
        "responses": padded([t.response_ids for t in trajectories], width, torch.long),
        "response_mask": padded([t.response_mask for t in trajectories], width, torch.float32),
        "rollout_log_probs": padded([t.log_probs for t in trajectories], width, torch.float32),
        "prompt_length": torch.tensor([len(t.prompt_ids) for t in trajectories]),
        "response_length": torch.tensor([len(t.response_ids) for t in trajectories]),
        "version": torch.tensor([t.version for t in trajectories]),
    }
    texts = {
        "stop_reason": np.array([t.stop_reason for t in trajectories], dtype=object),
        "status": np.array([t.state.value for t in trajectories], dtype=object),
    }
    return DataProto(batch, texts, {})
