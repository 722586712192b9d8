"""Where rows come from: one module a source, found by name."""

import difflib
import importlib
import pkgutil
from typing import TYPE_CHECKING, Any, Protocol, cast

from rl_core.errors import InputError

if TYPE_CHECKING:
    from rl_core.config.schema import DataConfig


class Source(Protocol):
    """What a module in this package provides."""

    SCORER: str | None
    """Name in rl_core/rewards/scorers.py; None where each row's `data_source` names its own."""

    def rows(self, config: "DataConfig", seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Training rows and held-out rows; raises InputError when they cannot be had as asked."""

    def reference_response(self, row: dict[str, Any]) -> str | list[dict[str, str]]:
        """The text that a perfect model would answer; where it calls tools, its turns and what answers them."""


def source_names() -> list[str]:
    """Names that `load_source` knows."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load_source(name: str) -> Source:
    """The source of that name; raises InputError with the nearest name otherwise."""
    names = source_names()
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        fix = f"did you mean data.source={nearest[0]}?" if nearest else "choose one of them, or files for your own"
        raise InputError(f"a source among {', '.join(names)}", f"'{name}'", "data.source", fix)
    return cast(Source, importlib.import_module(f"{__name__}.{name}"))
