"""Whole conversations with real tools and environments; the policy's turns are given."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rl_core.config.schema import RunConfig
from rl_core.data.dataset import encode_prompt
from rl_core.data.protocol import DataProto
from rl_core.models.load import load_tokenizer
from rl_core.rewards.runner import RewardRunner
from rl_core.rollout.agent.agent_loop import roll_out
from rl_core.rollout.agent.responders import ToolResponders
from rl_core.rollout.engine.protocol import Completion, Sampling
from rl_core.rollout.scoring import TrajectoryScorer

PROMPT = [{"role": "user", "content": "12*34"}]


class Script:
    """An engine whose turns are given, by the row's seed."""

    def __init__(self, tokenizer: Any, turns: list[list[str]]) -> None:
        self.tokenizer, self.turns = tokenizer, [list(each) for each in turns]
        self.read: list[str] = []

    async def generate(self, token_ids: list[int], seed: int, sampling: Sampling) -> Completion:
        self.read.append(self.tokenizer.decode(token_ids))
        number = next(i for i in range(len(self.turns)) if i * 100 <= seed < i * 100 + 100)
        text = self.turns[number].pop(0)
        ids = [*self.tokenizer.encode(text), self.tokenizer.eos_token_id][: sampling.max_tokens]
        stop = "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"
        return Completion(token_ids, ids, [-0.5] * len(ids), [3] * len(ids), stop)  # type: ignore[arg-type]

    def finish_batch(self) -> None:
        pass


def talk(
    model: Path,
    *turns: list[str],
    agent: dict[str, Any],
    row: dict[str, Any] | None = None,
    room: int = 200,
    reward: dict[str, Any] | None = None,
) -> tuple[DataProto, Script]:
    """The trajectories of rows with these turns, scored where `reward` has settings, and what the engine read."""
    names = agent.get("tools", [])
    tools = [name if ":" in name or name == "calculator" else f"tools_for_tests:{name}" for name in names]
    settings = {"parser": "pythonic", "tool_timeout_s": 2.0, **agent, "tools": tools}
    config = RunConfig.model_validate({"agent": settings, "data": {"max_prompt_length": 24}, "reward": reward or {}})
    tokenizer = load_tokenizer(model)
    engine = Script(tokenizer, list(turns))
    rows = [{"prompt": PROMPT, "extra_info": {}, **(row or {})}] * len(turns)
    ids = encode_prompt(tokenizer, rows[0]["prompt"], "here")
    seeds = [100 * i for i in range(len(turns))]
    prompts = DataProto.from_dict({}, {"prompt_ids": [ids] * len(turns), "seed": seeds, "row": rows})

    async def work() -> DataProto:
        responders, scoring = ToolResponders(config, model), None
        async with AsyncExitStack() as stack:
            stack.push_async_callback(responders.runner.close)
            await responders.start()
            if reward is not None:
                runner = await stack.enter_async_context(RewardRunner(config.reward))
                scoring = TrajectoryScorer(runner, tokenizer)
            sampling = Sampling(1.0, room, (2,))
            return await roll_out(engine, prompts, sampling, config.agent, responders, scoring)  # type: ignore[arg-type]

    return asyncio.run(work()), engine
