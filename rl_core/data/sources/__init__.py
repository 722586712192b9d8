"""Sources of rows: one module per source, selected by name."""

import importlib
import pkgutil
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, cast

from rl_core.errors import InputError, near_names

if TYPE_CHECKING:
    from rl_core.config.data import SourceConfig
    from rl_core.data.rows import Found


NO_SOURCE = "files"
"""The `data_source` of rows from files that do not set one; no scorer has this name."""


class Source(Protocol):
    """Interface of the modules in this package."""

    SCORER: str | None
    """Name in rl_core/rewards/scorers.py; None if each row's `data_source` selects its scorer."""

    def rows(self, config: "SourceConfig", seed: int) -> tuple[Iterable["Found"], Iterable["Found"]]:
        """Training rows and held-out rows, with an InputError in place of each invalid row.

        Rows of files are read lazily and only once. Raises InputError, at once or during iteration, if the requested
        rows cannot be provided.
        """

    def reference_response(self, row: dict[str, Any]) -> str | list[dict[str, str]]:
        """The response of a perfect model; if it calls tools, the list of its turns and the tool results."""


def source_names() -> list[str]:
    """Names accepted by `load_source`."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load_source(name: str) -> Source:
    """The source with this name; otherwise raises InputError, with the nearest name if one is similar."""
    names = source_names()
    if name not in names:
        nearest = near_names(name, names, 1)
        fix = f"did you mean data.source={nearest[0]}?" if nearest else "use one of these; `files` reads your own files"
        raise InputError(f"one of the sources {', '.join(names)}", f"'{name}'", "data.source", fix)
    return cast(Source, importlib.import_module(f"{__name__}.{name}"))
