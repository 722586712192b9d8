"""The life of a trajectory over a rollout engine: PENDING → RUNNING ⇄ TOOL_CALLING → COMPLETED or FAILED.

One asyncio task a trajectory; whatever is asked of the engine at the same time is decoded together. A single turn is
a conversation without anyone who answers.
"""

import asyncio
import time
from dataclasses import replace
from typing import Any, Protocol

from rl_core.config.schema import AgentConfig
from rl_core.data.protocol import DataProto
from rl_core.rewards.worker import RewardResult
from rl_core.rollout.engine.protocol import RolloutEngine, Sampling
from rl_core.rollout.scoring import score_columns
from rl_core.rollout.trajectory import Trajectory, TrajectoryState, to_batch


class TurnResponder(Protocol):
    """Who answers the policy's turns in one conversation."""

    async def answer(self, trajectory: Trajectory) -> list[int] | None:
        """The tokens that follow the last turn, up to the start of the next one; None when the conversation is over.

        Notes calls, rewards and failures in the trajectory.
        """
        ...

    async def finish(self, trajectory: Trajectory) -> None:
        """Adds the last rewards to a trajectory that has ended well."""
        ...

    async def release(self) -> None:
        """Lets go of what the conversation held."""
        ...


class Partners(Protocol):
    """Makes the responder of each conversation."""

    async def open(self, trajectory: Trajectory) -> TurnResponder:
        """The responder of a trajectory, which may add to its prompt."""
        ...


class Scoring(Protocol):
    """Gives trajectories their scores."""

    async def score(self, trajectory: Trajectory) -> RewardResult:
        """The result of a trajectory that has ended."""
        ...


async def roll_out(
    engine: RolloutEngine,
    prompts: DataProto,
    sampling: Sampling,
    config: AgentConfig,
    responders: Partners | None = None,
    scoring: Scoring | None = None,
) -> DataProto:
    """Conversations on the rows' `prompt_ids` with the rows' `seed`, joined to the rows as `to_batch` describes.

    `sampling.max_tokens` is the room for a whole response, which is all turns and all answers to them. Without
    log-probs there is no column `rollout_log_probs`. Each trajectory is scored as it ends, while others go on; the
    scores are columns as `score_columns` describes, and absent where prompts have no `row`.
    """
    rows = prompts.non_tensor_batch
    given: Any = rows.get("row", [{}] * len(prompts))
    trajectories = [
        Trajectory(list(ids), int(seed), row)
        for ids, seed, row in zip(rows["prompt_ids"], rows["seed"], given, strict=True)
    ]
    scoring = scoring if "row" in rows else None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_lived_and_scored(trajectory, engine, sampling, config, responders, scoring))
                for trajectory in trajectories
            ]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # its kind decides about a retry
    finally:
        engine.finish_batch()
    batch = to_batch(trajectories, sampling.max_tokens)
    if not sampling.log_probs:
        batch.pop(["rollout_log_probs"])
    ended, results = zip(*(task.result() for task in tasks), strict=True)
    if scoring:
        batch = batch.union(score_columns(list(results), time.monotonic() - max(ended)))
    return prompts.union(batch)


async def _lived_and_scored(
    trajectory: Trajectory,
    engine: RolloutEngine,
    sampling: Sampling,
    config: AgentConfig,
    responders: Partners | None,
    scoring: Scoring | None,
) -> tuple[float, RewardResult | None]:
    """When the trajectory ended, and what its score is."""
    await live(trajectory, engine, sampling, config, responders)
    return time.monotonic(), await scoring.score(trajectory) if scoring else None


async def live(
    trajectory: Trajectory,
    engine: RolloutEngine,
    sampling: Sampling,
    config: AgentConfig,
    responders: Partners | None,
) -> None:
    """Leads one trajectory from PENDING to its end."""
    responder = None
    try:
        async with asyncio.timeout(config.timeout_s) as deadline:
            responder = await responders.open(trajectory) if responders else None
            await _converse(trajectory, engine, sampling, config, responder)
            if responder and trajectory.state is TrajectoryState.COMPLETED:
                await responder.finish(trajectory)
    except TimeoutError:
        if not deadline.expired():
            raise
        trajectory.fail("timeout", f"no end within agent.timeout_s={config.timeout_s:g} s")
    finally:
        if responder:
            await responder.release()


async def _converse(
    trajectory: Trajectory,
    engine: RolloutEngine,
    sampling: Sampling,
    config: AgentConfig,
    responder: TurnResponder | None,
) -> None:
    while trajectory.state is not TrajectoryState.FAILED:
        trajectory.state = TrajectoryState.RUNNING
        room = sampling.max_tokens - len(trajectory.response_ids)
        seed = (trajectory.seed + trajectory.turns) % 2**32
        ids = trajectory.prompt_ids + trajectory.response_ids
        trajectory.take(await engine.generate(ids, seed, replace(sampling, max_tokens=room)))
        if not trajectory.response_mask[trajectory.answer_start :]:
            trajectory.fail("empty", "the rollout engine sampled no token")
            break
        answer = None
        if responder and trajectory.stop_reason == "stop":
            answer = await responder.answer(trajectory)
        if answer is None:
            break
        if trajectory.turns == config.max_turns:
            trajectory.stop_reason = "max_turns"
            break
        if len(answer) >= room - (len(trajectory.response_ids) - trajectory.answer_start):
            trajectory.stop_reason = "length"
            break
        trajectory.append(answer)
    if trajectory.state is not TrajectoryState.FAILED:
        trajectory.state = TrajectoryState.COMPLETED
