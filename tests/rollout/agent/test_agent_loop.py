import asyncio
from typing import Any, Literal

import numpy as np
import pytest
import torch
from support import single_turns

from rl_core.config.schema import AgentConfig
from rl_core.data.protocol import DataProto
from rl_core.errors import TrainingError, TransientError
from rl_core.rollout.agent.agent_loop import roll_out
from rl_core.rollout.engine.protocol import Completion, Sampling
from rl_core.rollout.trajectory import Trajectory, TrajectoryState

SAMPLING = Sampling(0.7, 5, (2,))
TURNS: dict[tuple[int, ...], tuple[list[int], list[float], list[int], Literal["stop", "length"]]] = {
    (4, 9): ([9, 2], [-0.5, -0.25], [3, 3], "stop"),
    (4,): ([9, 8, 7, 6, 5], [-1.0, -2.0, -3.0, -4.0, -5.0], [2, 2, 3, 3, 3], "length"),
    (4, 9, 9): ([], [], [], "length"),
    (4, 9, 9, 2, 7, 7): ([2], [-0.125], [4], "stop"),
}


class Recorded:
    """Plays recorded turns, and writes down what it was asked."""

    version = 3

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int, int]] = []

    async def generate(self, token_ids: list[int], seed: int, sampling: Sampling) -> Completion:
        self.asked.append((token_ids, seed, sampling.max_tokens))
        return Completion(token_ids, *TURNS[tuple(token_ids)])

    def finish_batch(self) -> None:
        pass


class Echo:
    """Answers the first turn with two tokens, and gives rewards."""

    def __init__(self, times: int = 1, answer: tuple[int, ...] = (7, 7)) -> None:
        self.times, self.tokens, self.closed = times, list(answer), 0

    async def open(self, trajectory: Trajectory) -> "Echo":
        return self

    async def answer(self, trajectory: Trajectory) -> list[int] | None:
        if trajectory.turns > self.times:
            return None
        trajectory.reward += 0.5
        return self.tokens

    async def finish(self, trajectory: Trajectory) -> None:
        trajectory.reward += 1.0

    async def release(self) -> None:
        self.closed += 1


class Broken(Echo):
    """Fails in the way that it is told."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def answer(self, trajectory: Trajectory) -> list[int] | None:
        raise self.error


class Stuck(Echo):
    """Never answers."""

    async def answer(self, trajectory: Trajectory) -> list[int] | None:
        await asyncio.sleep(60)
        return None


def rollout() -> tuple[Recorded, DataProto]:
    engine = Recorded()
    columns: dict[str, Any] = {"prompt_ids": [[4, 9], [4], [4, 9, 9]], "seed": [5, 6, 7], "uid": ["a", "b", "c"]}
    return engine, single_turns(engine, DataProto.from_dict({}, columns), SAMPLING)  # type: ignore[arg-type]


def conversation(responder: Echo, width: int = 8, **settings: object) -> DataProto:
    columns: dict[str, Any] = {"prompt_ids": [[4, 9]], "seed": [5], "uid": ["a"]}
    config = AgentConfig.model_validate(settings)
    sampling = Sampling(0.7, width, (2,))
    engine, prompts = Recorded(), DataProto.from_dict({}, columns)
    TURNS[4, 9, 9, 2, *responder.tokens] = TURNS[4, 9, 9, 2, 7, 7]
    return asyncio.run(roll_out(engine, prompts, sampling, config, responder))  # type: ignore[arg-type]


def test_the_engine_gets_prompts_and_seeds_in_order() -> None:
    engine, _ = rollout()
    assert engine.asked == [([4, 9], 5, 5), ([4], 6, 5), ([4, 9, 9], 7, 5)]


def test_the_padded_view_holds_tokens_masks_and_log_probs() -> None:
    batch = rollout()[1].batch
    assert batch["prompts"].tolist() == [[4, 9, 0], [4, 0, 0], [4, 9, 9]]
    assert batch["prompt_length"].tolist() == [2, 1, 3]
    assert batch["responses"].tolist() == [[9, 2, 0, 0, 0], [9, 8, 7, 6, 5], [0] * 5]
    assert batch["response_length"].tolist() == [2, 5, 0]
    assert batch["response_mask"].tolist() == [[1, 1, 0, 0, 0], [1] * 5, [0] * 5]
    assert batch["rollout_log_probs"].tolist() == [[-0.5, -0.25, 0, 0, 0], [-1, -2, -3, -4, -5], [0] * 5]
    assert batch["version"].tolist() == [[3, 3, -1, -1, -1], [2, 2, 3, 3, 3], [-1] * 5]
    assert batch["responses"].dtype == torch.long
    assert batch["response_mask"].dtype == batch["rollout_log_probs"].dtype == torch.float32


def test_rows_keep_what_they_came_with_and_get_a_state() -> None:
    rows = rollout()[1].non_tensor_batch
    assert rows["uid"].tolist() == ["a", "b", "c"]
    assert rows["status"].tolist() == ["completed", "completed", "failed"]
    assert rows["stop_reason"].tolist() == ["stop", "length", "empty"]
    assert all(isinstance(rows[name], np.ndarray) for name in ("status", "stop_reason"))


def test_what_answers_a_turn_is_part_of_the_response_and_not_the_policys() -> None:
    responder = Echo()
    data = conversation(responder)
    batch = data.batch
    assert batch["responses"][0].tolist() == [9, 2, 7, 7, 2, 0, 0, 0]
    assert batch["response_mask"][0].tolist() == [1, 1, 0, 0, 1, 0, 0, 0]
    assert batch["rollout_log_probs"][0].tolist() == [-0.5, -0.25, 0, 0, -0.125, 0, 0, 0]
    assert batch["version"][0].tolist() == [3, 3, -1, -1, 4, -1, -1, -1]
    assert (batch["answer_start"].item(), batch["turns"].item(), batch["turn_reward"].item()) == (4, 2, 1.5)
    assert data.non_tensor_batch["status"].tolist() == ["completed"] and responder.closed == 1


@pytest.mark.parametrize(
    ("width", "settings", "reason", "length"),
    [(8, {"max_turns": 1}, "max_turns", 2), (4, {}, "length", 2), (5, {}, "stop", 5)],
)
def test_a_conversation_ends_at_its_limits_with_a_sampled_token(
    width: int, settings: dict[str, Any], reason: str, length: int
) -> None:
    data = conversation(Echo(), width, **settings)
    assert data.non_tensor_batch["stop_reason"].tolist() == [reason]
    assert data.batch["response_length"].tolist() == [length]
    assert data.batch["response_mask"][0, length - 1] == 1


def test_a_conversation_that_does_not_end_fails_and_is_closed() -> None:
    responder = Stuck()
    data = conversation(responder, timeout_s=0.2)
    assert data.non_tensor_batch["status"].tolist() == ["failed"]
    assert data.non_tensor_batch["stop_reason"].tolist() == ["timeout"]
    assert "agent.timeout_s=0.2" in data.non_tensor_batch["detail"][0] and responder.closed == 1


def test_an_error_of_a_partner_is_raised_as_what_it_is() -> None:
    responder = Broken(TransientError("the tools are gone"))
    with pytest.raises(TransientError, match="the tools are gone"):
        conversation(responder)
    assert responder.closed == 1


def test_only_its_own_deadline_is_the_failure_of_a_trajectory() -> None:
    with pytest.raises(TimeoutError, match="of something else"):
        conversation(Broken(TimeoutError("of something else")))


def test_tokens_that_the_engine_did_not_read_are_noticed() -> None:
    trajectory = Trajectory([4], seed=0)
    trajectory.take(Completion([4], [9, 2], [-0.5, -0.25], [3, 3], "stop"))
    trajectory.append([7])
    with pytest.raises(TrainingError, match="before turn 2 the rollout engine read 3 tokens"):
        trajectory.take(Completion([4, 9, 2], [8], [-1.0], [4], "length"))


def test_a_trajectory_collects_its_turns() -> None:
    trajectory = Trajectory([4], seed=0)
    assert trajectory.state is TrajectoryState.PENDING
    trajectory.take(Completion([4], [9, 2], [-0.5, -0.25], [3, 3], "stop"))
    trajectory.take(Completion([4, 9, 2], [8], [-1.0], [4], "length"))
    assert trajectory.response_ids == [9, 2, 8] and trajectory.response_mask == [1, 1, 1]
    assert trajectory.log_probs == [-0.5, -0.25, -1.0] and trajectory.versions == [3, 3, 4]
    assert (trajectory.stop_reason, trajectory.turns, trajectory.answer_start) == ("length", 2, 2)
