"""Finding what a setting names: a tool that comes along, or something of the user's own modules."""

import difflib
import functools
import importlib
import pickle
from collections.abc import Callable
from typing import Any

from rl_core.errors import InputError
from rl_core.rollout.tools.base import FunctionTool, Tool, unusable
from rl_core.rollout.tools.calculator import calculator

ToolFactory = Callable[[], Tool]

BUILTIN: dict[str, Callable[..., Any]] = {"calculator": calculator}


def resolve_tools(names: tuple[str, ...]) -> dict[str, ToolFactory]:
    """What makes each named tool, by the name that the policy calls it.

    A name is that of a tool that comes along, or `package.module:name` of a function or a class derived from Tool.
    Raises InputError when there is none, when it has no usable schema or no `execute`, and when two tools have the
    same name.
    """
    factories: dict[str, ToolFactory] = {}
    for name in names:
        found = _find(name)
        is_class = isinstance(found, type) and issubclass(found, Tool)
        factory: ToolFactory = found if is_class else functools.partial(FunctionTool, found)
        called = _checked_name(factory, f"agent.tools: '{name}'")
        if called in factories:
            raise same_name(called, "agent.tools")
        factories[called] = factory
    return factories


def import_named(name: str, where: str, expected: str) -> Any:
    """What `package.module:name` names; raises InputError saying why it cannot be imported."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # a user's module may fail in any way while it is imported
        seen = f"'{name}' ({type(error).__name__}: {error})"
        fix = "check the spelling and that its folder is on PYTHONPATH"
        raise InputError(f"{expected} that can be imported", seen, where, fix) from error


def nearest(name: str, names: list[str]) -> str:
    """A question with the names that look like the given one, or nothing."""
    close = difflib.get_close_matches(name, names, cutoff=0.4)
    return f"did you mean {' or '.join(close)}? " if close else ""


def same_name(name: str, where: str) -> InputError:
    """The error for two tools that the policy could not tell apart."""
    return InputError("tools of different names", f"two tools named '{name}'", where, "rename one or leave it out")


def _find(name: str) -> Any:
    if name in BUILTIN:
        return BUILTIN[name]
    if ":" not in name:
        expected = f"a tool among {', '.join(BUILTIN)}, or package.module:name"
        fix = nearest(name, list(BUILTIN)) + "name a tool that comes along, or your own as package.module:name"
        raise InputError(expected, f"'{name}'", "agent.tools", fix)
    found = import_named(name, "agent.tools", "package.module:name of a tool")
    if not callable(found) or (isinstance(found, type) and not issubclass(found, Tool)):
        seen = f"'{name}' is a {found.__name__ if isinstance(found, type) else type(found).__name__}"
        raise InputError("a function or a class derived from Tool", seen, "agent.tools", "name one of the module")
    return found


def _checked_name(factory: ToolFactory, where: str) -> str:
    """The name in the tool's schema, after making one and seeing that it can be sent to another process."""
    try:
        made = factory()
        name = made.schema()["function"]["name"]
        if not (isinstance(name, str) and name):
            raise TypeError("it has no name")
        if type(made).execute is Tool.execute:
            raise TypeError("it has no method `execute`")
        pickle.dumps(made)
    except Exception as error:  # a user's class may fail in any way
        raise unusable(where, error) from error
    return name
