"""Environments: what answers a turn of the policy that calls no tool."""

import functools
import json
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from rl_core.errors import InputError
from rl_core.rollout.call_pool import CallPool, checked_reward
from rl_core.rollout.tools.resolve import import_named
from rl_core.runtime.process_pool import finished, writable

Message = dict[str, Any]


@dataclass(frozen=True)
class EnvironmentStep:
    """What follows a turn: messages before the next one, a reward, and whether the conversation is over."""

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False


@dataclass(frozen=True)
class EnvironmentOutcome:
    """How a call of an environment ended; unless `ok` the trajectory has failed, and `detail` says why."""

    status: Literal["ok", "error", "timeout"]
    step: EnvironmentStep
    seconds: float
    detail: str = ""


class Environment:
    """Base of environments; one instance serves one trajectory.

    Its methods run in another process: the instance is pickled, sent there, and comes back changed when the call
    succeeds. Methods may be asynchronous.
    """

    def reset(self, row: dict[str, Any]) -> list[Message]:
        """Messages that are appended to the row's prompt before the first turn."""
        return []

    def step(self, turn: str) -> EnvironmentStep:
        """What follows a turn of the policy."""
        raise NotImplementedError


class EnvironmentSession:
    """The environment of one trajectory."""

    def __init__(self, environment: type[Environment], pool: CallPool) -> None:
        self._pool = pool
        self._state = pickle.dumps(environment)

    async def reset(self, row: dict[str, Any]) -> EnvironmentOutcome:
        """Begins the conversation of a row; the outcome has the messages after its prompt."""
        return await self._call(_reset, row)

    async def step(self, turn: str) -> EnvironmentOutcome:
        """What follows a turn of the policy."""
        return await self._call(_step, turn)

    async def _call(self, action: Callable[..., EnvironmentStep], argument: Any) -> EnvironmentOutcome:
        begin = time.monotonic()
        reply = await self._pool.call(self._state, action, argument)
        seconds = time.monotonic() - begin
        if reply.status == "ok":
            self._state = reply.state
            return EnvironmentOutcome("ok", reply.value, seconds)
        status: Literal["error", "timeout"] = "timeout" if reply.status == "timeout" else "error"
        return EnvironmentOutcome(status, EnvironmentStep(), seconds, reply.detail or reply.text)


@functools.cache
def resolve_environment(name: str) -> type[Environment]:
    """The class for `package.module:Class`; raises InputError when it cannot be imported, is something else, has no
    `step` of its own or cannot be made and sent to another process."""
    where = "agent.environment"
    found = import_named(name, where, "package.module:Class of an environment")
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise InputError("a class derived from Environment", f"'{name}'", where, "name such a class of the module")
    if found.step is Environment.step:
        raise InputError("an environment with a method `step`", f"'{name}' has none", where, "give it one")
    try:
        pickle.dumps(found())
    except Exception as error:  # a user's class may fail in any way
        seen = f"'{name}' ({type(error).__name__}: {error})"
        fix = "let it be made without arguments, and open what cannot be pickled inside `step`"
        raise InputError("an environment that can be sent to another process", seen, where, fix) from error
    return found


def _reset(environment: Environment, row: dict[str, Any]) -> EnvironmentStep:
    return EnvironmentStep(_checked_messages(finished(environment.reset(row))))


def _step(environment: Environment, turn: str) -> EnvironmentStep:
    step = finished(environment.step(turn))
    if not isinstance(step, EnvironmentStep):
        raise TypeError(f"step returned {type(step).__name__}, expected EnvironmentStep")
    return EnvironmentStep(_checked_messages(step.messages), checked_reward(step.reward), bool(step.done))


def _checked_messages(messages: Any) -> list[Message]:
    """The messages as plain values; raises TypeError when they are not what a chat template takes."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise TypeError(f"expected a list of messages, got {messages!r:.200}")
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise TypeError(f"expected a message with a role and a content, got {message!r:.200}")
    plain: list[Message] = json.loads(json.dumps(messages))
    return [message | {"content": writable(message["content"])} for message in plain]
