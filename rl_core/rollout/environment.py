"""Environments: they reply to turns in which the policy calls no tool."""

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
    """Reply to a turn: messages before the next turn, a reward, and whether the conversation is over."""

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False


@dataclass(frozen=True)
class EnvironmentOutcome:
    """Outcome of an environment call; any status but `ok` fails the trajectory, and `detail` has the reason."""

    status: Literal["ok", "error", "timeout"]
    step: EnvironmentStep
    seconds: float
    detail: str = ""


class Environment:
    """Base class of environments; one instance per trajectory.

    Methods run in another process: the instance is pickled and sent there, and its new state is sent back if the call
    succeeds. Methods may be asynchronous.
    """

    def reset(self, row: dict[str, Any]) -> list[Message]:
        """Returns messages to append to the row's prompt before the first turn."""
        return []

    def step(self, turn: str) -> EnvironmentStep:
        """Returns the reply to a turn of the policy."""
        raise NotImplementedError


class EnvironmentSession:
    """The environment of one trajectory."""

    def __init__(self, environment: type[Environment], pool: CallPool) -> None:
        self._pool = pool
        self._state = pickle.dumps(environment)

    async def reset(self, row: dict[str, Any]) -> EnvironmentOutcome:
        """Starts the conversation of a row; the outcome has the messages to append to its prompt."""
        return await self._call(_reset, row)

    async def step(self, turn: str) -> EnvironmentOutcome:
        """Outcome of the environment's step for a turn of the policy."""
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
    """Class at `package.module:Class`; raises InputError if it cannot be imported, is not an Environment, does not
    override `step`, or cannot be created without arguments and pickled."""
    where = "agent.environment"
    found = import_named(name, where, "package.module:Class of an environment")
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise InputError("a class derived from Environment", f"'{name}'", where, "name such a class of the module")
    if found.step is Environment.step:
        raise InputError("an environment with a method `step`", f"'{name}' has none", where, "implement `step`")
    try:
        pickle.dumps(found())
    except Exception as error:  # a user's class can raise anything
        seen = f"'{name}' ({type(error).__name__}: {error})"
        fix = "make it constructible without arguments, and open resources that do not pickle inside `step`"
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
    """The messages as plain JSON values; raises TypeError if they are not valid chat messages."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise TypeError(f"expected a list of messages, got {messages!r:.200}")
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise TypeError(f"expected a message with a role and a content, got {message!r:.200}")
    plain: list[Message] = json.loads(json.dumps(messages))
    return [message | {"content": writable(message["content"])} for message in plain]
