"""A conversation of the policy as tokens: sampled tokens, replies of tools and environment, and how it ended."""

from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Any

import numpy as np
import torch

from rl_core.data.protocol import DataProto
from rl_core.errors import TrainingError
from rl_core.rollout.engine.protocol import Completion


class TrajectoryState(Enum):
    """State of a trajectory."""

    PENDING = "pending"
    RUNNING = "running"
    TOOL_CALLING = "tool_calling"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass
class Trajectory:
    """One conversation: the prompt, then the turns of the policy (mask 1) and the replies to them (mask 0)."""

    prompt_ids: list[int]
    seed: int
    row: dict[str, Any] = field(default_factory=dict)
    state: TrajectoryState = TrajectoryState.PENDING
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: str = ""
    turns: int = 0
    answer_start: int = 0
    """Index in the response where the last turn starts."""
    reward: float = 0.0
    """Sum of the rewards from tools and environment."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Tool calls and environment steps, each with turn, name, arguments, status, text, seconds and detail."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The policy's turns (role assistant, with `token_ids` instead of a text) and the replies to them."""
    detail: str = ""
    """Reason of a failure."""

    def take(self, completion: Completion) -> None:
        """Adds a sampled turn; raises TrainingError if the engine's prompt differs from the trajectory's tokens."""
        if completion.prompt_ids != self.prompt_ids + self.response_ids:
            raise TrainingError(
                f"before turn {self.turns + 1} the rollout engine read {len(completion.prompt_ids)} tokens that differ "
                f"from the {len(self.prompt_ids) + len(self.response_ids)} tokens of the trajectory"
            )
        count = len(completion.token_ids)
        self.answer_start = len(self.response_ids)
        self.response_ids += completion.token_ids
        self.response_mask += [1] * count
        self.log_probs += completion.log_probs or [0.0] * count
        self.versions += completion.versions
        self.messages.append({"role": "assistant", "token_ids": completion.token_ids})
        self.stop_reason = completion.stop_reason
        self.turns += 1

    def append(self, token_ids: list[int]) -> None:
        """Adds the reply to the last turn, up to the start of the next turn."""
        count = len(token_ids)
        self.response_ids += token_ids
        self.response_mask += [0] * count
        self.log_probs += [0.0] * count
        self.versions += [-1] * count

    def fail(self, reason: str, detail: str) -> None:
        """Marks the trajectory as failed, which excludes it from training."""
        self.state, self.stop_reason, self.detail = TrajectoryState.FAILED, reason, detail


def to_batch(trajectories: list[Trajectory], width: int) -> DataProto:
    """Trajectories as a padded batch; responses are padded to `width` tokens.

    Columns: `prompts` [B, P], `responses`, `response_mask`, `rollout_log_probs`, `version` [B, R] (−1 for tokens that
    were not sampled), `prompt_length`, `response_length`, `answer_start`, `turns`, `turn_reward` [B], and
    `stop_reason`, `status`, `detail`, `calls` per row.
    """
    longest = max(len(t.prompt_ids) for t in trajectories)

    def padded(sequences: list[list[Any]], columns: int, dtype: type[np.generic], filler: int = 0) -> torch.Tensor:
        out = np.full((len(sequences), columns), filler, dtype=dtype)
        length_B = np.array([len(sequence) for sequence in sequences])
        # `fromiter` takes a sixth of the time of building tensors from lists.
        out[np.arange(columns) < length_B[:, None]] = np.fromiter(chain(*sequences), dtype, length_B.sum())
        return torch.from_numpy(out)

    batch = {
        "prompts": padded([t.prompt_ids for t in trajectories], longest, np.int64),
        "responses": padded([t.response_ids for t in trajectories], width, np.int64),
        "response_mask": padded([t.response_mask for t in trajectories], width, np.float32),
        "rollout_log_probs": padded([t.log_probs for t in trajectories], width, np.float32),
        "version": padded([t.versions for t in trajectories], width, np.int64, filler=-1),
        "prompt_length": torch.tensor([len(t.prompt_ids) for t in trajectories]),
        "response_length": torch.tensor([len(t.response_ids) for t in trajectories]),
        "answer_start": torch.tensor([t.answer_start for t in trajectories]),
        "turns": torch.tensor([t.turns for t in trajectories]),
        "turn_reward": torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
    }

    others: dict[str, list[Any]] = {
        "stop_reason": [t.stop_reason for t in trajectories],
        "status": [t.state.value for t in trajectories],
        "detail": [t.detail for t in trajectories],
        "calls": [t.calls for t in trajectories],
    }
    return DataProto.from_dict(batch, others)
