"""Tools that a policy calls: what they are, those that come along, and how others are found by name."""

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
