"""Tools and environments of one rollout engine, shared by its trajectories."""

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rl_core.config.schema import AgentConfig
from rl_core.rollout.agent.toolbox import OpenTool, PoolTool, Toolbox, ToolFailure, ToolOutcome, tools_of_row
from rl_core.rollout.call_pool import CallPool
from rl_core.rollout.environment import EnvironmentOutcome, EnvironmentSession, resolve_environment
from rl_core.rollout.tools import ToolFactory, resolve_tools
from rl_core.rollout.tools.resolve import same_name

if TYPE_CHECKING:
    from rl_core.rollout.agent.mcp import McpServer

__all__ = ["ToolFailure", "ToolOutcome", "ToolRunner", "Toolbox", "tool_schemas"]


class ToolRunner:
    """Tools and environment for trajectories, alive from `start` to `close` or inside an asynchronous context manager.

    Raises InputError if a tool or the environment does not exist.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._factories = resolve_tools(config.tools)
        self._environment = resolve_environment(config.environment) if config.environment else None
        named = [name for name in (*config.tools, config.environment) if name and ":" in name]
        modules = tuple(name.partition(":")[0] for name in named)
        self._pool = CallPool(config.tool_processes, config.tool_timeout_s, modules)
        self._needs_pool = bool(config.tools or config.environment)
        self._servers = _servers(config)
        self._served: dict[str, McpServer] = {}

    async def __aenter__(self) -> "ToolRunner":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Starts the processes and connects to the MCP servers; raises InputError or TransientError."""
        try:
            if self._needs_pool:
                await self._pool.start()
            await asyncio.gather(*(server.start() for server in self._servers))
            self._served = _tools_by_name(self._factories, self._servers)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends all processes and sessions, including running calls."""
        await asyncio.gather(self._pool.close(), *(server.close() for server in self._servers))

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI function schemas of all tools; complete after `start`."""
        own = [factory().schema() for factory in self._factories.values()]
        return [*own, *(server.tools[name] for name, server in self._served.items())]

    async def open(self, row: dict[str, Any]) -> Toolbox:
        """Creates the tools of a row's trajectory; raises ToolFailure if one fails, InputError for unknown ones.

        `extra_info.tools_kwargs` of the row selects tools and has the keyword arguments of their methods:
        `{name: {create_kwargs, execute_kwargs, calc_reward_kwargs, release_kwargs}}`; without it, all tools are used.
        """
        selected = tools_of_row(row, [*self._factories, *self._served])
        toolbox = Toolbox({name: self._open(name, kwargs) for name, kwargs in selected.items()})
        await toolbox.create()
        return toolbox

    async def reset(self, row: dict[str, Any]) -> tuple[EnvironmentSession, EnvironmentOutcome]:
        """Environment of a row's trajectory and its opening messages; ValueError if agent.environment is unset."""
        if self._environment is None:
            raise ValueError("agent.environment is unset")
        session = EnvironmentSession(self._environment, self._pool)
        return session, await session.reset(row)

    def _open(self, name: str, kwargs: dict[str, dict[str, Any]]) -> OpenTool:
        if name in self._factories:
            return PoolTool(self._factories[name], self._pool, kwargs)
        from rl_core.rollout.agent.mcp import McpTool

        return McpTool(self._served[name], name, kwargs)


def tool_schemas(config: AgentConfig) -> list[dict[str, Any]]:
    """OpenAI function schemas of all configured tools; starts no worker processes, but queries the MCP servers.

    Raises InputError if a tool does not exist or two have the same name, TransientError if a server is unreachable.
    """
    factories = resolve_tools(config.tools)
    schemas = [factory().schema() for factory in factories.values()]
    return [*schemas, *asyncio.run(_served_schemas(config, factories))] if config.mcp_servers else schemas


async def _served_schemas(config: AgentConfig, factories: dict[str, ToolFactory]) -> list[dict[str, Any]]:
    servers = _servers(config)
    try:
        await asyncio.gather(*(server.start() for server in servers))
        return [server.tools[name] for name, server in _tools_by_name(factories, servers).items()]
    finally:
        await asyncio.gather(*(server.close() for server in servers))


def _servers(config: AgentConfig) -> "list[McpServer]":
    if not config.mcp_servers:
        return []
    from rl_core.rollout.agent.mcp import McpServer  # mcp takes most of a second to import

    return [McpServer(setting, config.tool_timeout_s) for setting in config.mcp_servers]


def _tools_by_name(factories: dict[str, ToolFactory], servers: "list[McpServer]") -> "dict[str, McpServer]":
    """Server of each MCP tool by name; raises InputError if two tools have the same name."""
    served: dict[str, McpServer] = {}
    for server in servers:
        for name in server.tools:
            if name in factories or name in served:
                raise same_name(name, f"agent.mcp_servers: {server.label}")
            served[name] = server
    return served
