"""Tools of MCP servers: one session per server, shared by all trajectories of a rollout engine."""

import asyncio
import itertools
import logging
import os
import re
import shlex
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp_types import CONNECTION_CLOSED, CallToolResult
from mcp_types import Tool as Listed

from rl_core.errors import InputError, TransientError
from rl_core.rollout.agent.toolbox import ToolOutcome, as_text
from rl_core.rollout.call_pool import MAX_MESSAGE
from rl_core.rollout.tools import function_schema

CONNECT_S = 60.0
"""Time limit in seconds for a server to start and list its tools."""
CLOSE_S = 10.0
"""Time limit in seconds for closing a session; mcp itself kills a server that does not exit."""
SESSION_LOST = "Session terminated"
"""Message of mcp if a restarted server does not know the session."""
WHERE = "agent.mcp_servers"
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_ASSIGNMENT = re.compile(r"\w+=(.*)", re.DOTALL)


class McpServer:
    """A session with one server, from `start` to `close`; the next call reopens a session that died.

    The setting is a URL (streamable HTTP) or a command line (stdio); variables such as `$TOKEN` are taken from the
    environment. Errors never contain their values or a URL's credentials.
    """

    def __init__(self, setting: str, timeout_s: float) -> None:
        """Raises InputError if the setting is neither a URL nor a command line."""
        self._timeout_s = timeout_s
        self._is_url = setting.startswith(("http://", "https://"))
        try:
            parts = [setting] if self._is_url else shlex.split(setting)
        except ValueError as error:
            raise InputError("a URL or a command line", str(error), WHERE, "close the quotation") from None
        if not parts:
            raise InputError("a URL or a command line", "an empty string", WHERE, "remove it")
        for name in ("httpx2", "mcp"):  # their log lines contain full URLs
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._parts = [os.path.expandvars(part) for part in parts]
        self._secrets = _secrets(parts, self._parts)
        self.label = _label(self._parts)
        self._lock = asyncio.Lock()
        self._client: Client | None = None
        self._owner: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self.tools: dict[str, dict[str, Any]] = {}

    async def start(self) -> None:
        """Connects and lists the tools; raises InputError for an invalid command, TransientError for other failures."""
        try:
            async with asyncio.timeout(CONNECT_S):
                client = await self._live_client()
                listed = await _all_tools(client)
        except Exception as error:
            await self.close()
            raise self._unreachable(error) from None
        self.tools = {
            tool.name: function_schema(tool.name, tool.description or "", tool.input_schema) for tool in listed
        }

    async def close(self) -> None:
        """Ends the session and, if it was started by a command, the server."""
        owner, client, self._owner, self._client = self._owner, self._client, None, None
        if owner is None:
            return
        if client is not None:  # a session that is still connecting is cancelled instead
            self._stop.set()
            await asyncio.wait({owner}, timeout=CLOSE_S)
        owner.cancel()
        await asyncio.wait({owner})

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolOutcome:
        """Outcome of a call of one of the server's tools; reopens a dead session and retries once."""
        begin = time.monotonic()
        for _ in range(2):
            client: Client | None = None
            try:
                async with asyncio.timeout(CONNECT_S):
                    client = await self._live_client()
                async with asyncio.timeout(self._timeout_s):
                    return self._outcome(await client.call_tool(name, arguments), begin)
            except TimeoutError:
                if client is None:
                    break
                return self._failed("timeout", f"no answer within {self._timeout_s:g} s", begin)
            except MCPError as error:
                if error.code != CONNECTION_CLOSED and error.message != SESSION_LOST:
                    return self._failed("error", error.message, begin)
                await self._drop(client)
            except Exception:  # transports can raise anything; their messages may contain secrets
                await self._drop(client)
        return self._failed("error", f"MCP server {self.label} does not answer", begin)

    def _outcome(self, result: CallToolResult, begin: float) -> ToolOutcome:
        blocks = [_block_text(block) for block in result.content]
        text = "\n".join(blocks) if blocks else as_text(result.structured_content)
        if result.is_error:
            return self._failed("error", text, begin)
        return ToolOutcome(as_text(text), "ok", time.monotonic() - begin)

    def _failed(self, status: Any, text: str, begin: float) -> ToolOutcome:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return ToolOutcome(f"Error: {as_text(text[:MAX_MESSAGE])}", status, time.monotonic() - begin)

    async def _live_client(self) -> Client:
        async with self._lock:
            if self._client is None:
                await self.close()
                ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
                self._stop = asyncio.Event()
                self._owner = asyncio.create_task(self._own(ready, self._stop))
                self._client = await ready
            return self._client

    async def _drop(self, client: Client | None) -> None:
        async with self._lock:
            if self._client is client:  # otherwise another call has already opened a new session
                await self.close()

    async def _own(self, ready: "asyncio.Future[Client]", stop: asyncio.Event) -> None:
        """Enters and leaves the session in a single task, as its cancel scopes require."""
        try:
            async with self._session() as client:
                if not ready.done():
                    ready.set_result(client)
                await stop.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Client]:
        if self._is_url:
            async with Client(self._parts[0]) as client:
                yield client
            return
        variables, (command, *args) = _command(self._parts)
        with open(os.devnull, "w") as quiet:
            server = StdioServerParameters(command=command, args=args, env=variables)
            transport = stdio_client(server, errlog=quiet)
            async with Client(transport) as client:
                yield client

    def _unreachable(self, error: Exception) -> Exception:
        if not self._is_url and isinstance(error, OSError) and not isinstance(error, TimeoutError):
            seen = f"'{self.label}' ({type(error).__name__})"
            return InputError("a command that can be started", seen, WHERE, "check the command and PATH")
        return TransientError(f"MCP server {self.label} did not list its tools ({_reason(error)})")


class McpTool:
    """A server's tool in one trajectory; the row's `execute_kwargs` take precedence over the policy's arguments."""

    def __init__(self, server: McpServer, name: str, kwargs: dict[str, dict[str, Any]]) -> None:
        self.schema = server.tools[name]
        self._server, self._name, self._fixed = server, name, kwargs.get("execute_kwargs", {})

    async def call(self, arguments: dict[str, Any]) -> ToolOutcome:
        """Outcome of one call."""
        return await self._server.call(self._name, {**arguments, **self._fixed})


async def _all_tools(client: Client) -> list[Listed]:
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _block_text(block: Any) -> str:
    found = getattr(block, "text", None) or getattr(getattr(block, "resource", None), "text", None)
    return found if isinstance(found, str) else f"[{block.type}]"


def _command(parts: list[str]) -> tuple[dict[str, str], list[str]]:
    """Variables and command of `env NAME=VALUE … COMMAND`: on a command line, other users could read the values."""
    command = list(itertools.dropwhile(_ASSIGNMENT.fullmatch, parts[1:]))
    if parts[0] != "env" or not command or command[0].startswith("-"):
        return {}, parts
    assignments = parts[1 : len(parts) - len(command)]
    return {name: value for name, _, value in (each.partition("=") for each in assignments)}, command


def _secrets(written: list[str], expanded: list[str]) -> list[str]:
    """Strings to redact: values of variables and assignments, and a URL's credentials and query."""
    names = [name for part in written for pair in _VARIABLE.findall(part) for name in pair if name]
    values = [os.environ.get(name, "") for name in names]
    values += [match[1] for part in expanded if (match := _ASSIGNMENT.fullmatch(part))]
    for part in expanded:
        with suppress(ValueError):
            url = urlsplit(part)
            values += [url.username or "", url.password or "", url.query]
    return sorted({value for value in values if value}, key=len, reverse=True)


def _label(parts: list[str]) -> str:
    """Server name for messages: host and port of a URL, or the program of a command."""
    first = next((part for part in parts if part != "env" and not _ASSIGNMENT.fullmatch(part)), parts[0])
    return urlsplit(first).netloc.rpartition("@")[2] or PurePath(first).name


def _reason(error: BaseException) -> str:
    """Type of the error, without its message, which may contain secrets."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return type(error).__name__
