"""An MCP server that misbehaves when asked to; `http PORT` serves it over HTTP, otherwise over stdio."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


@server.tool()
async def process() -> str:
    """The server's process, after a moment."""
    import asyncio

    await asyncio.sleep(0.3)
    return str(os.getpid())


@server.tool()
def misbehave(how: str) -> str:
    """Do what the argument says."""
    if how == "sleep":
        time.sleep(600)
    if how == "exit":
        os._exit(1)
    if how == "tell":
        raise ToolError(f"the key {os.environ.get('SECRET_KEY')} is refused")
    return "a\0b"


if sys.argv[1:2] == ["http"]:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
else:
    server.run("stdio")
