"""Tools that a policy can call: the `Tool` interface, the built-in tools, and resolving tools by name."""

from rl_core.rollout.tools.base import BadArguments, Tool, ToolError, ToolResult, function_schema, tool
from rl_core.rollout.tools.resolve import ToolFactory, resolve_tools

__all__ = [
    "BadArguments",
    "Tool",
    "ToolError",
    "ToolFactory",
    "ToolResult",
    "function_schema",
    "resolve_tools",
    "tool",
]
