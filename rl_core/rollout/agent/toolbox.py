"""The tools of one trajectory and the outcomes of their calls."""

import asyncio
import json
import pickle
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rl_core.data.json_columns import without_none
from rl_core.errors import InputError, RollforwardError
from rl_core.rollout.call_pool import CallPool, Reply, checked_reward
from rl_core.rollout.tools import Tool, ToolFactory, ToolResult
from rl_core.rollout.tools.base import FunctionTool
from rl_core.rollout.tools.resolve import nearest
from rl_core.runtime.process_pool import finished, writable

MAX_TEXT = 1_000_000
"""Maximum length of a tool result in characters; the middle of a longer one is removed."""
MAX_DEPTH = 50
"""Maximum nesting depth of a call's arguments."""
Method = Literal["create", "execute", "calc_reward", "release"]
METHODS: tuple[Method, ...] = ("create", "execute", "calc_reward", "release")
Kwargs = dict[str, Any]


@dataclass(frozen=True)
class ToolOutcome:
    """Outcome of a call: `text` is passed to the policy, `detail` has the traceback, if any."""

    text: str
    status: Literal["ok", "broken_call", "unknown_tool", "bad_arguments", "too_many", "error", "timeout"]
    seconds: float
    reward: float = 0.0
    detail: str = ""


class ToolFailure(RollforwardError):
    """A tool could not be created or failed to compute its reward; only its trajectory fails."""

    def __init__(self, tool: str, method: Method, reply: Reply) -> None:
        super().__init__(f"{method} of tool '{tool}': {reply.text}")
        self.status, self.detail = reply.status, reply.detail


class OpenTool(Protocol):
    """A tool of one trajectory."""

    schema: dict[str, Any]

    async def call(self, arguments: dict[str, Any]) -> ToolOutcome:
        """Outcome of one call."""
        ...


class PoolTool:
    """A tool whose methods run in a process of the pool; calls of a tool with state run one after another."""

    def __init__(self, factory: ToolFactory, pool: CallPool, kwargs: dict[str, Kwargs]) -> None:
        tool = factory()
        self.schema = tool.schema()
        self._name = self.schema["function"]["name"]
        self._pool, self._kwargs = pool, kwargs
        self._overridden = {method for method in METHODS if getattr(type(tool), method) is not getattr(Tool, method)}
        is_function = isinstance(tool, FunctionTool)
        self._state = pickle.dumps(tool if is_function else factory)
        self._created = False
        self._lock = nullcontext() if is_function else asyncio.Lock()

    async def create(self) -> None:
        """Creates the tool; raises ToolFailure if that fails."""
        await self._run("create", _create)
        self._created = True

    async def call(self, arguments: dict[str, Any]) -> ToolOutcome:
        """Outcome of one call."""
        begin = time.monotonic()
        reply = await self._reply("execute", _execute, arguments)
        seconds = time.monotonic() - begin
        if reply.status == "ok":
            return ToolOutcome(reply.value.text, "ok", seconds, reply.value.reward)
        return ToolOutcome(f"Error: {reply.text}", reply.status, seconds, detail=reply.detail)

    async def calc_reward(self) -> float:
        """The tool's reward, 0 if it does not override the method; raises ToolFailure if the method fails."""
        return float(await self._run("calc_reward", _calc_reward) or 0.0)

    async def release(self) -> None:
        """Releases the tool if it was created; raises ToolFailure if that fails."""
        if self._created:
            await self._run("release", _release)

    async def _run(self, method: Method, action: Any) -> Any:
        if method not in self._overridden:
            return None
        reply = await self._reply(method, action)
        if reply.status != "ok":
            raise ToolFailure(self._name, method, reply)
        return reply.value

    async def _reply(self, method: Method, action: Any, *args: Any) -> Reply:
        async with self._lock:
            reply = await self._pool.call(self._state, action, *args, self._kwargs.get(f"{method}_kwargs", {}))
            if reply.status == "ok":
                self._state = reply.state
            return reply


class Toolbox:
    """The tools that the policy may call in one trajectory."""

    def __init__(self, tools: Mapping[str, OpenTool]) -> None:
        self._tools = tools
        self._stateful = {name: tool for name, tool in tools.items() if isinstance(tool, PoolTool)}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI function schemas of the tools."""
        return [tool.schema for tool in self._tools.values()]

    async def create(self) -> None:
        """Creates the tools; if one fails, releases the others and raises ToolFailure."""
        try:
            await _gather(tool.create() for tool in self._stateful.values())
        except BaseException:
            await self.release()
            raise

    async def call(self, name: str, arguments: Any) -> ToolOutcome:
        """Outcome of one call; raises TransientError if the tool processes themselves fail."""
        if name not in self._tools:
            known = f"the tools are {', '.join(self._tools)}" if self._tools else "there are no tools"
            return ToolOutcome(f"Error: there is no tool {writable(name[:100])!r}; {known}", "unknown_tool", 0.0)
        try:
            plain = _plain(arguments)
        except (TypeError, ValueError) as error:
            return ToolOutcome(f"Error: {error}", "bad_arguments", 0.0)
        return await self._tools[name].call(plain)

    async def calc_rewards(self) -> dict[str, float]:
        """Rewards of the tools after the last turn, 0 for tools without one; raises ToolFailure."""
        rewards = await _gather(tool.calc_reward() for tool in self._stateful.values())
        return dict.fromkeys(self._tools, 0.0) | dict(zip(self._stateful, rewards, strict=True))

    async def release(self) -> list[ToolFailure]:
        """Releases all tools; failures are returned, not raised, because they do not affect rewards."""
        ended = await asyncio.gather(*(tool.release() for tool in self._stateful.values()), return_exceptions=True)
        if others := [end for end in ended if isinstance(end, BaseException) and not isinstance(end, ToolFailure)]:
            raise others[0]
        return [end for end in ended if isinstance(end, ToolFailure)]


def tools_of_row(row: dict[str, Any], names: list[str]) -> dict[str, dict[str, Kwargs]]:
    """Names of the row's tools with the keyword arguments of their methods; all tools if the row selects none.

    Entries that are None are ignored, because columnar files give every row all keys. Raises InputError for an unknown
    tool or method.
    """
    tools_kwargs = (row.get("extra_info") or {}).get("tools_kwargs")
    if not isinstance(tools_kwargs, dict):
        return {name: {} for name in names}
    selected: dict[str, dict[str, Kwargs]] = without_none(tools_kwargs)
    allowed = [f"{method}_kwargs" for method in METHODS]
    for name, kwargs in selected.items():
        _known(name, names, "extra_info.tools_kwargs", "add it to agent.tools")
        for key in kwargs:
            _known(key, allowed, f"extra_info.tools_kwargs.{name}", "name a method of the tool")
    return selected


def row_schemas(schemas: list[dict[str, Any]]) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    """Function that maps a row to the schemas of its tools, as selected by `tools_of_row`."""
    by_name = {schema["function"]["name"]: schema for schema in schemas}
    return lambda row: [by_name[name] for name in tools_of_row(row, list(by_name))]


def as_text(answer: Any) -> str:
    """Text of a tool result for the policy: a string as it is, any other value as JSON or, failing that, by `str`."""
    if not isinstance(answer, str):
        try:
            answer = json.dumps(answer, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            answer = str(answer)
    if len(answer) > MAX_TEXT:
        half = MAX_TEXT // 2
        answer = f"{answer[:half]}\n[{len(answer) - 2 * half} characters left out]\n{answer[-half:]}"
    return writable(answer)


def _plain(arguments: Any) -> dict[str, Any]:
    """The arguments as plain JSON values; raises ValueError if they are not a JSON object or nested too deeply."""
    if not isinstance(arguments, dict):
        raise ValueError("the arguments must be a JSON object")
    if _is_deeper(arguments, MAX_DEPTH):
        raise ValueError(f"the arguments are nested deeper than {MAX_DEPTH}")
    plain: dict[str, Any] = json.loads(json.dumps(arguments, ensure_ascii=False).encode("utf-8", "replace"))
    return plain


def _is_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return levels < 0 or any(_is_deeper(part, levels - 1) for part in inner)


async def _gather(calls: Any) -> list[Any]:
    """Results of all calls; raises the first error after all have ended."""
    ended: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
    for end in ended:
        if isinstance(end, BaseException):
            raise end
    return ended


def _known(name: str, names: list[str], where: str, fix: str) -> None:
    if name not in names:
        raise InputError(f"one of {', '.join(names)}", f"'{name}'", where, nearest(name, names) + fix)


def _create(tool: Any, kwargs: Kwargs) -> None:
    finished(tool.create(**kwargs))


def _execute(tool: Tool, arguments: dict[str, Any], kwargs: Kwargs) -> ToolResult:
    answer = finished(tool.execute(tool.parse(arguments), **kwargs))
    if isinstance(answer, ToolResult):
        return ToolResult(as_text(answer.text), checked_reward(answer.reward))
    return ToolResult(as_text(answer))


def _calc_reward(tool: Tool, kwargs: Kwargs) -> float:
    return checked_reward(finished(tool.calc_reward(**kwargs)))


def _release(tool: Any, kwargs: Kwargs) -> None:
    finished(tool.release(**kwargs))
