"""Where rows come from: one module a source, found by name."""

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, cast

from rl_core.errors import InputError

if TYPE_CHECKING:
    from rl_core.config.data import SourceConfig
    from rl_core.data.rows import Found


NO_SOURCE = "files"
"""The `data_source` of rows of files that name none; no scorer has this name."""


class Source(Protocol):
    """What a module in this package provides."""

    SCORER: str | None
    """Name in rl_core/rewards/scorers.py; None where each row's `data_source` names its own."""

    def rows(self, config: "SourceConfig", seed: int) -> tuple[Iterable["Found"], Iterable["Found"]]:
        """Training rows and held-out rows, with an InputError in the place of each that cannot be used.

        Those of files are read while they are asked for, once. Raises InputError, at once or then, when rows cannot be
        had as asked.
        """

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
