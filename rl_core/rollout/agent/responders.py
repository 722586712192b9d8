"""Replies to the policy's turns: tool results or, if the turn calls no tool, the environment's reply."""

import asyncio
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl_core.config.schema import AgentConfig, RunConfig
from rl_core.data.dataset import encode_prompt
from rl_core.models.load import load_tokenizer, stop_tokens
from rl_core.rollout.agent.chat import ChatTemplate
from rl_core.rollout.agent.parsers import PARSERS, ToolCall
from rl_core.rollout.agent.tool_runner import Toolbox, ToolFailure, ToolOutcome, ToolRunner
from rl_core.rollout.environment import EnvironmentOutcome, EnvironmentSession
from rl_core.rollout.trajectory import Trajectory, TrajectoryState

Message = dict[str, Any]


class ToolResponders:
    """Tools and environment of one rollout engine; creates the responder of each conversation."""

    def __init__(self, config: RunConfig, source: Path) -> None:
        """Raises InputError if a tool or the environment does not exist."""
        self.agent, self.max_prompt_length = config.agent, config.data.max_prompt_length
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(source)
        self.stop_token_ids = stop_tokens(source)
        self.runner = ToolRunner(config.agent)
        self.parse = PARSERS[config.agent.parser]

    async def start(self) -> None:
        """Starts the processes and sessions shared by the responders.

        Raises InputError if the chat template cannot append the required messages.
        """
        await self.runner.start()
        self.chat = chat_template(self.tokenizer, self.runner.schemas, self.agent, self.stop_token_ids)

    async def open(self, trajectory: Trajectory) -> "ToolResponder":
        """Creates the responder of a trajectory; an environment may extend the prompt."""
        responder = ToolResponder(self)
        try:
            await responder.begin(trajectory)
        except BaseException:
            await responder.release()
            raise
        return responder


def chat_template(
    tokenizer: PreTrainedTokenizerBase,
    schemas: list[dict[str, Any]],
    agent: AgentConfig,
    stop_token_ids: tuple[int, ...],
) -> ChatTemplate:
    """The tokenizer's chat template for appending replies; raises InputError if it is not append-only."""
    kinds = {"tool"} if schemas else set()
    return ChatTemplate(tokenizer, schemas, kinds | ({"user"} if agent.environment else set()), stop_token_ids)


class ToolResponder:
    """Replies to the turns of one trajectory."""

    def __init__(self, responders: ToolResponders) -> None:
        self.shared = responders
        self.calls = 0
        self.toolbox: Toolbox | None = None
        self.environment: EnvironmentSession | None = None

    async def begin(self, trajectory: Trajectory) -> None:
        """Opens the row's tools and environment."""
        try:
            self.toolbox = await self.shared.runner.open(trajectory.row)
        except ToolFailure as failure:
            trajectory.fail(f"tool_{failure.status}", f"{failure}\n{failure.detail}")
            return
        functions = [schema["function"] for schema in self.toolbox.schemas]
        self.parameters = {function["name"]: function.get("parameters", {}) for function in functions}
        if self.shared.agent.environment:
            self.environment, opening = await self.shared.runner.reset(trajectory.row)
            self._open(trajectory, opening)

    def _open(self, trajectory: Trajectory, opening: EnvironmentOutcome) -> None:
        """Extends the prompt with the environment's opening messages."""
        if opening.status != "ok":
            trajectory.fail(f"environment_{opening.status}", opening.detail)
        elif opening.step.messages:
            assert self.toolbox
            messages = [*trajectory.row["prompt"], *opening.step.messages]
            where = "the prompt with the environment's messages"
            ids = encode_prompt(self.shared.tokenizer, messages, where, self.toolbox.schemas)
            if len(ids) > self.shared.max_prompt_length:
                trajectory.fail(
                    "prompt_length",
                    f"{where} has {len(ids)} tokens (data.max_prompt_length={self.shared.max_prompt_length})",
                )
            else:
                trajectory.prompt_ids = ids

    async def answer(self, trajectory: Trajectory) -> list[int] | None:
        """Tokens of the reply to the last turn; None if there is none."""
        assert self.toolbox
        *ids, last_id = trajectory.response_ids[trajectory.answer_start :]
        text = str(self.shared.tokenizer.decode(ids))
        calls = self.shared.parse(text, self.parameters)[1] if self.parameters else []
        if calls:
            messages = await self._call(trajectory, calls)
        elif self.environment:
            messages = await self._step(trajectory, text)
        else:
            return None
        trajectory.messages += messages
        return self.shared.chat.appended_ids(messages, last_id) if messages else None

    async def finish(self, trajectory: Trajectory) -> None:
        """Adds the tools' final rewards."""
        assert self.toolbox
        try:
            trajectory.reward += sum((await self.toolbox.calc_rewards()).values())
        except ToolFailure as failure:
            trajectory.fail(f"tool_{failure.status}", f"{failure}\n{failure.detail}")

    async def release(self) -> None:
        """Releases the tools."""
        if self.toolbox:
            await self.toolbox.release()

    async def _call(self, trajectory: Trajectory, calls: list[ToolCall]) -> list[Message]:
        """Runs a turn's calls concurrently; returns their results as tool messages."""
        trajectory.state = TrajectoryState.TOOL_CALLING
        remaining = self.shared.agent.max_tool_calls - self.calls
        self.calls += len(calls)
        outcomes = await asyncio.gather(*(self._outcome(call, i < remaining) for i, call in enumerate(calls)))
        messages = []
        for call, outcome in zip(calls, outcomes, strict=True):
            text = self.shared.chat.cut(outcome.text, self.shared.agent.max_tool_tokens)
            messages.append({"role": "tool", "name": call.name, "content": text})
            self._record(trajectory, call.name, call.arguments, outcome.status, text, outcome.seconds, outcome.detail)
            trajectory.reward += outcome.reward
        return messages

    async def _outcome(self, call: ToolCall, allowed: bool) -> ToolOutcome:
        assert self.toolbox
        if not allowed:
            limit = self.shared.agent.max_tool_calls
            return ToolOutcome(f"Error: no more than {limit} tool calls are allowed", "too_many", 0.0)
        if call.error:
            return ToolOutcome(f"Error: {call.error}", "broken_call", 0.0)
        return await self.toolbox.call(call.name, call.arguments)

    async def _step(self, trajectory: Trajectory, text: str) -> list[Message]:
        assert self.environment
        outcome = await self.environment.step(text)
        if outcome.status != "ok":
            trajectory.fail(f"environment_{outcome.status}", outcome.detail)
            return []
        trajectory.reward += outcome.step.reward
        reply = "\n".join(message["content"] for message in outcome.step.messages)
        self._record(trajectory, "environment", {}, "ok", reply, outcome.seconds, "")
        return [] if outcome.step.done else outcome.step.messages

    def _record(
        self,
        trajectory: Trajectory,
        name: str,
        arguments: dict[str, Any],
        status: str,
        text: str,
        seconds: float,
        detail: str,
    ) -> None:
        trajectory.calls.append(
            {
                "turn": trajectory.turns,
                "name": name,
                "arguments": arguments,
                "status": status,
                "text": text,
                "seconds": seconds,
                "detail": detail,
            }
        )
