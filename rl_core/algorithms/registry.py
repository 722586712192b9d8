"""Estimators and policy losses by name, and by import path for those that are not part of the library.

A function of one's own is one function in one file: give it the same parameters, and its name as
`package.module:function` in the recipe; the decorators only add a short name.
"""

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rl_core.errors import InputError

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry(Generic[Function]):
    """A registered function and what the trainer has to fetch for it."""

    function: Function
    needs: tuple[str, ...] = ()
    agg_mode: str | None = None


@dataclass
class Registry(Generic[Function]):
    """Functions of one kind by name."""

    kind: str
    setting: str
    entries: dict[str, Entry[Function]] = field(default_factory=dict)

    def register(
        self, name: str, needs: tuple[str, ...] = (), agg_mode: str | None = None
    ) -> Callable[[Function], Function]:
        """Decorator that gives a function a name.

        Args:
            needs: names of further tensors or settings that the function takes by keyword.
            agg_mode: the only aggregation that the loss is defined for; unset follows the config.
        """

        def keep(function: Function) -> Function:
            self.entries[name] = Entry(function, needs, agg_mode)
            # Found again by import path, whatever the file is called.
            function.registry_entry = self.entries[name]  # type: ignore[attr-defined]
            return function

        return keep

    def resolve(self, name: str) -> Entry[Function]:
        """The entry of a name or of `package.module:function`; InputError with the nearest names."""
        if name in self.entries:
            return self.entries[name]
        module, _, function_name = name.partition(":")
        if function_name:
            try:
                function = getattr(importlib.import_module(module), function_name)
            except (ImportError, AttributeError) as error:
                raise InputError(
                    f"a function that can be imported as the {self.kind}",
                    f"{type(error).__name__}: {error}",
                    f"{self.setting}={name}",
                    "put the file into the working directory or on PYTHONPATH",
                ) from error
            entry: Entry[Function] = getattr(function, "registry_entry", Entry(function))
            return entry
        near = difflib.get_close_matches(name, self.entries, n=3) or sorted(self.entries)
        raise InputError(
            f"the name of a {self.kind} ({', '.join(sorted(self.entries))}) or package.module:function",
            repr(name),
            self.setting,
            f"did you mean {' or '.join(near)}?",
        )
