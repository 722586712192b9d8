"""Resolves names in settings: a built-in tool, or an object in a user's module."""

import functools
import importlib
import pickle
from collections.abc import Callable
from typing import Any

from rl_core.errors import InputError, near_names
from rl_core.rollout.tools.base import FunctionTool, Tool, unusable
from rl_core.rollout.tools.calculator import calculator

ToolFactory = Callable[[], Tool]

BUILTIN: dict[str, Callable[..., Any]] = {"calculator": calculator}


def resolve_tools(names: tuple[str, ...]) -> dict[str, ToolFactory]:
    """Factories of the named tools, keyed by the name in each tool's schema.

    A name is that of a built-in tool, or `package.module:name` of a function or a class derived from Tool. Raises
    InputError if it cannot be resolved, if the tool has no usable schema or no `execute`, or if two tools have the same
    name.
    """
    factories: dict[str, ToolFactory] = {}
    for name in names:
        target = _find(name)
        is_class = isinstance(target, type) and issubclass(target, Tool)
        factory: ToolFactory = target if is_class else functools.partial(FunctionTool, target)
        tool_name = _checked_name(factory, f"agent.tools: '{name}'")
        if tool_name in factories:
            raise same_name(tool_name, "agent.tools")
        factories[tool_name] = factory
    return factories


def import_named(name: str, where: str, expected: str) -> Any:
    """Object at `package.module:name`; raises InputError with the reason if it cannot be imported."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # importing a user's module can raise anything
        seen = f"'{name}' ({type(error).__name__}: {error})"
        fix = "check the spelling and that its folder is on PYTHONPATH"
        raise InputError(f"{expected} that can be imported", seen, where, fix) from error


def nearest(name: str, names: list[str]) -> str:
    """Question "did you mean …?" with the most similar names; empty if none is similar."""
    close = near_names(name, names)
    return f"did you mean {' or '.join(close)}? " if close else ""


def same_name(name: str, where: str) -> InputError:
    """Error for two tools with the same name."""
    return InputError("tools with distinct names", f"two tools named '{name}'", where, "rename or remove one of them")


def _find(name: str) -> Any:
    if name in BUILTIN:
        return BUILTIN[name]
    if ":" not in name:
        expected = f"a built-in tool ({', '.join(BUILTIN)}) or package.module:name"
        fix = nearest(name, list(BUILTIN)) + "name a built-in tool, or your own as package.module:name"
        raise InputError(expected, f"'{name}'", "agent.tools", fix)
    target = import_named(name, "agent.tools", "package.module:name of a tool")
    if not callable(target) or (isinstance(target, type) and not issubclass(target, Tool)):
        seen = f"'{name}' is a {target.__name__ if isinstance(target, type) else type(target).__name__}"
        fix = "name a function or such a class of the module"
        raise InputError("a function or a class derived from Tool", seen, "agent.tools", fix)
    return target


def _checked_name(factory: ToolFactory, where: str) -> str:
    """Name in the tool's schema; raises InputError if the tool cannot be created, executed or pickled."""
    try:
        instance = factory()
        name = instance.schema()["function"]["name"]
        if not (isinstance(name, str) and name):
            raise TypeError("the tool has no name")
        if type(instance).execute is Tool.execute:
            raise TypeError("the tool has no method `execute`")
        pickle.dumps(instance)
    except Exception as error:  # a user's class can raise anything
        raise unusable(where, error) from error
    return name
