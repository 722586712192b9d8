"""Parameters shared by several flows; Prefect validates them before it creates a flow run."""

from typing import Annotated, Literal

from pydantic import Field

GateMode = Literal["off", "dry_run", "enforce"]
Hours = Annotated[float, Field(gt=0)]


def gate_setting(mode: GateMode | None) -> list[str]:
    """The override for a gate mode; empty if the recipe's setting applies."""
    return [] if mode is None else [f"gate.mode={mode}"]
