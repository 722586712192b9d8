import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rl_core.config.schema import AgentConfig
from rl_core.errors import InputError
from rl_core.rollout.agent.tool_runner import ToolRunner
from rl_core.rollout.environment import EnvironmentOutcome, EnvironmentStep


def with_environment(work: Callable[[ToolRunner], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        settings = AgentConfig(environment="tools_for_tests:Countdown", tool_timeout_s=1.0, tool_processes=2)
        async with ToolRunner(settings) as runner:
            return await work(runner)

    return asyncio.run(run())


def test_an_environment_answers_turns_until_it_is_done() -> None:
    async def work(runner: ToolRunner) -> list[EnvironmentOutcome]:
        session, opening = await runner.reset({"turns": 2})
        _, quiet = await runner.reset({"turns": 0})
        assert quiet.step == EnvironmentStep()
        return [opening, await session.step("a"), await session.step("b")]

    outcomes = with_environment(work)
    assert [outcome.status for outcome in outcomes] == ["ok"] * 3
    assert [outcome.step for outcome in outcomes] == [
        EnvironmentStep([{"role": "user", "content": "2 turns \\ud800"}]),
        EnvironmentStep([{"role": "user", "content": "1"}], 0.5),
        EnvironmentStep([{"role": "user", "content": "0"}], 0.5, True),
    ]


def test_an_environment_that_fails_or_hangs_fails_its_trajectory_only() -> None:
    turns = {
        "sleep": ("timeout", "no answer within 1 s"),
        "exit": ("error", "exit code 1"),
        "messages": ("error", "expected a message with a role and a content"),
        "reward": ("error", "expected a finite number"),
        "nothing": ("error", "step returned NoneType"),
    }

    async def work(runner: ToolRunner) -> list[EnvironmentOutcome]:
        async def one(turn: str) -> EnvironmentOutcome:
            session, _ = await runner.reset({"turns": 2})
            return await session.step(turn)

        _, failed = await runner.reset({"turns": "raise"})
        return [failed, *await asyncio.gather(*map(one, [*turns, "fine"]))]

    failed, *outcomes, fine = with_environment(work)
    assert failed.status == "error" and "cannot begin" in failed.detail
    for outcome, (status, detail) in zip(outcomes, turns.values(), strict=True):
        assert outcome.status == status and detail in outcome.detail
        assert outcome.step == EnvironmentStep()
    assert fine.status == "ok"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Diary", "derived from Environment"),
        ("X", "imported"),
        ("NoStep", "has none"),
        ("Particular", "missing 1 required positional argument: 'limit'"),
    ],
)
def test_names_without_a_usable_environment_are_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ToolRunner(AgentConfig(environment=f"tools_for_tests:{name}"))
