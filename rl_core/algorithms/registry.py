"""Registry of estimators and policy losses by name, or by import path for user-defined functions.

A user-defined function takes the same parameters and is set in the recipe as `package.module:function`; the decorator
`register` is only needed for extra inputs (`needs`), a fixed `agg_mode` or a short name.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rl_core.errors import InputError, near_names

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry(Generic[Function]):
    """A registered function and the extra inputs that the trainer provides for it."""

    function: Function
    needs: tuple[str, ...] = ()
    agg_mode: str | None = None


@dataclass
class Registry(Generic[Function]):
    """Functions of one kind, by name."""

    kind: str
    setting: str
    entries: dict[str, Entry[Function]] = field(default_factory=dict)

    def register(
        self, name: str, needs: tuple[str, ...] = (), agg_mode: str | None = None
    ) -> Callable[[Function], Function]:
        """Decorator that registers a function under a name.

        Args:
            needs: names of extra tensors or settings that the function takes as keyword arguments.
            agg_mode: the only aggregation that the loss is defined for; None follows the config.
        """

        def decorate(function: Function) -> Function:
            self.entries[name] = Entry(function, needs, agg_mode)
            # Lets `resolve` find the entry when the function is given by import path.
            function.registry_entry = self.entries[name]  # type: ignore[attr-defined]
            return function

        return decorate

    def resolve(self, name: str) -> Entry[Function]:
        """Entry for a name or `package.module:function`; raises InputError with the most similar names."""
        if name in self.entries:
            return self.entries[name]
        module, _, function_name = name.partition(":")
        if function_name:
            try:
                function = getattr(importlib.import_module(module), function_name)
            except (ImportError, AttributeError) as error:
                raise InputError(
                    f"an importable function for the {self.kind}",
                    f"{type(error).__name__}: {error}",
                    f"{self.setting}={name}",
                    "check the spelling, and put the file into the working directory or on PYTHONPATH",
                ) from error
            entry: Entry[Function] = getattr(function, "registry_entry", Entry(function))
            return entry
        near = near_names(name, self.entries)
        raise InputError(
            f"the name of a {self.kind} ({', '.join(sorted(self.entries))}) or package.module:function",
            repr(name),
            self.setting,
            f"did you mean {' or '.join(near)}?" if near else "use one of these names (docs/algorithms.md)",
        )
