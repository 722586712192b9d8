import numpy as np
import torch

from rl_core.data.protocol import DataProto
from rl_core.rollout.agent_loop import Trajectory, TrajectoryState, run_trajectories
from rl_core.rollout.engine import Completion, Sampling

SAMPLING = Sampling(0.7, 5, (2,))
ANSWERS = {
    (4, 9): Completion([9, 2], [-0.5, -0.25], "stop", 3),
    (4,): Completion([9, 8, 7, 6, 5], [-1.0, -2.0, -3.0, -4.0, -5.0], "length", 3),
    (4, 9, 9): Completion([], [], "length", 3),
}


class Recorded:
    """Plays recorded responses, and writes down what it was asked."""

    version = 3

    def generate(self, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[Completion]:
        self.asked = prompts, seeds, sampling
        return [ANSWERS[tuple(prompt)] for prompt in prompts]


def rollout() -> tuple[Recorded, DataProto]:
    engine = Recorded()
    columns = {"prompt_ids": [list(p) for p in ANSWERS], "seed": [5, 6, 7], "uid": ["a", "b", "c"]}
    prompts = DataProto.from_dict({}, columns)
    return engine, run_trajectories(engine, prompts, SAMPLING)  # type: ignore[arg-type]


def test_the_engine_gets_prompts_and_seeds_in_order() -> None:
    engine, _ = rollout()
    assert engine.asked == ([[4, 9], [4], [4, 9, 9]], [5, 6, 7], SAMPLING)


def test_the_padded_view_holds_tokens_masks_and_log_probs() -> None:
    batch = rollout()[1].batch
    assert batch["prompts"].tolist() == [[4, 9, 0], [4, 0, 0], [4, 9, 9]]
    assert batch["prompt_length"].tolist() == [2, 1, 3]
    assert batch["responses"].tolist() == [[9, 2, 0, 0, 0], [9, 8, 7, 6, 5], [0] * 5]
    assert batch["response_length"].tolist() == [2, 5, 0]
    assert batch["response_mask"].tolist() == [[1, 1, 0, 0, 0], [1] * 5, [0] * 5]
    assert batch["rollout_log_probs"].tolist() == [[-0.5, -0.25, 0, 0, 0], [-1, -2, -3, -4, -5], [0] * 5]
    assert batch["version"].tolist() == [3, 3, 3]
    assert batch["responses"].dtype == torch.long
    assert batch["response_mask"].dtype == batch["rollout_log_probs"].dtype == torch.float32


def test_rows_keep_what_they_came_with_and_get_a_state() -> None:
    rows = rollout()[1].non_tensor_batch
    assert rows["uid"].tolist() == ["a", "b", "c"]
    assert rows["status"].tolist() == ["completed", "completed", "failed"]
    assert rows["stop_reason"].tolist() == ["stop", "length", "length"]
    assert all(isinstance(rows[name], np.ndarray) for name in ("status", "stop_reason"))


def test_a_trajectory_collects_its_turns() -> None:
    trajectory = Trajectory([4], seed=0)
    assert trajectory.state is TrajectoryState.PENDING
    trajectory.take(Completion([9, 2], [-0.5, -0.25], "stop", 3))
    trajectory.take(Completion([8], [-1.0], "length", 4))
    assert trajectory.state is TrajectoryState.COMPLETED
    assert trajectory.response_ids == [9, 2, 8] and trajectory.response_mask == [1, 1, 1]
    assert trajectory.log_probs == [-0.5, -0.25, -1.0]
    assert (trajectory.stop_reason, trajectory.version) == ("length", 4)
