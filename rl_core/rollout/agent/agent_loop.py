"""Runs trajectories on a rollout engine: PENDING → RUNNING ⇄ TOOL_CALLING → COMPLETED or FAILED.

There is one asyncio task per trajectory; the engine batches their concurrent requests. A single-turn rollout is a
conversation without a responder.
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
    """Replies to the policy's turns in one conversation."""

    async def answer(self, trajectory: Trajectory) -> list[int] | None:
        """Tokens of the reply to the last turn, up to the start of the next turn; None if the conversation is over.

        Records calls, rewards and failures in the trajectory.
        """
        ...

    async def finish(self, trajectory: Trajectory) -> None:
        """Adds the final rewards to a trajectory that has not failed."""
        ...

    async def release(self) -> None:
        """Releases the resources of the conversation."""
        ...


class Responders(Protocol):
    """Creates the responder of each conversation."""

    async def open(self, trajectory: Trajectory) -> TurnResponder:
        """Creates the responder of a trajectory; it may extend the prompt."""
        ...


class Scoring(Protocol):
    """Scores trajectories."""

    async def score(self, trajectory: Trajectory) -> RewardResult:
        """Result of a trajectory that has ended."""
        ...


async def roll_out(
    engine: RolloutEngine,
    prompts: DataProto,
    sampling: Sampling,
    config: AgentConfig,
    responders: Responders | None = None,
    scoring: Scoring | None = None,
) -> DataProto:
    """Runs a conversation for each row from its `prompt_ids` and `seed`; adds the columns of `to_batch` to the rows.

    `sampling.max_tokens` is the budget of a whole response: all turns and all replies to them. Without log-probs there
    is no column `rollout_log_probs`. Each trajectory is scored as soon as it ends, while others continue; the columns
    of `score_columns` are added if the prompts have `row`.
    """
    rows = prompts.non_tensor_batch
    source_rows: Any = rows.get("row", [{}] * len(prompts))
    trajectories = [
        Trajectory(list(ids), int(seed), row)
        for ids, seed, row in zip(rows["prompt_ids"], rows["seed"], source_rows, strict=True)
    ]
    scoring = scoring if "row" in rows else None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_run_and_score(trajectory, engine, sampling, config, responders, scoring))
                for trajectory in trajectories
            ]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # its type decides whether the attempt is retried
    finally:
        engine.finish_batch()
    batch = to_batch(trajectories, sampling.max_tokens)
    if not sampling.log_probs:
        batch.pop(["rollout_log_probs"])
    ended, results = zip(*(task.result() for task in tasks), strict=True)
    if scoring:
        batch = batch.union(score_columns(list(results), time.monotonic() - max(ended)))
    return prompts.union(batch)


async def _run_and_score(
    trajectory: Trajectory,
    engine: RolloutEngine,
    sampling: Sampling,
    config: AgentConfig,
    responders: Responders | None,
    scoring: Scoring | None,
) -> tuple[float, RewardResult | None]:
    """Time at which the trajectory ended (monotonic clock, seconds), and its score."""
    await run_trajectory(trajectory, engine, sampling, config, responders)
    return time.monotonic(), await scoring.score(trajectory) if scoring else None


async def run_trajectory(
    trajectory: Trajectory,
    engine: RolloutEngine,
    sampling: Sampling,
    config: AgentConfig,
    responders: Responders | None,
) -> None:
    """Runs one trajectory from PENDING to COMPLETED or FAILED."""
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
        trajectory.fail("timeout", f"the conversation exceeded agent.timeout_s={config.timeout_s:g} s")
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
        budget = sampling.max_tokens - len(trajectory.response_ids)
        seed = (trajectory.seed + trajectory.turns) % 2**32
        ids = trajectory.prompt_ids + trajectory.response_ids
        trajectory.take(await engine.generate(ids, seed, replace(sampling, max_tokens=budget)))
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
        if len(answer) >= budget - (len(trajectory.response_ids) - trajectory.answer_start):
            trajectory.stop_reason = "length"
            break
        trajectory.append(answer)
    if trajectory.state is not TrajectoryState.FAILED:
        trajectory.state = TrajectoryState.COMPLETED
