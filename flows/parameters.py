"""Parameters that several flows have; Prefect checks them before it makes a flow run."""

from typing import Annotated, Literal

from pydantic import Field

GateMode = Literal["off", "dry_run", "enforce"]
Hours = Annotated[float, Field(gt=0)]


def gate_setting(mode: GateMode | None) -> list[str]:
    """The setting of a gate mode, none when the recipe decides."""
    return [] if mode is None else [f"gate.mode={mode}"]
