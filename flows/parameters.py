"""Parameters shared by several flows; Prefect validates them before it creates a flow run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rl_core.config.compose import Composed, compose
from rl_core.config.trust import refuse_code
from rl_core.errors import InputError

GateMode = Literal["off", "dry_run", "enforce"]
Hours = Annotated[float, Field(gt=0)]


def gate_setting(mode: GateMode | None) -> list[str]:
    """The override for a gate mode; empty if the recipe's setting applies."""
    return [] if mode is None else [f"gate.mode={mode}"]


def compose_parameters(recipe: str, overrides: Sequence[str]) -> Composed:
    """The config of a flow run's parameters, which whoever may start flow runs chooses, code excepted.

    Raises InputError for a recipe file outside of the working directory, which is the folder of the deployment, and for
    overrides that name code, commands or servers that receive credentials.
    """
    folder = Path.cwd().resolve()
    if recipe.endswith(".yaml") and not Path(recipe).expanduser().resolve().is_relative_to(folder):
        raise InputError(
            expected=f"the name of a recipe, or a .yaml file below {folder}",
            seen=recipe,
            where="parameter `recipe` of the flow run",
            fix="put the file into the folder in which `rollforward deploy` was run",
        )
    composed = compose(recipe, overrides)
    refuse_code(composed)
    return composed
