"""Settings that name code, commands or receivers of secrets, or end a protection.

A recipe may set them, a flow run's parameters may not.
"""

from rl_core.config.compose import Composed, dotted_fields, settings
from rl_core.config.learning import Trusted
from rl_core.errors import InputError


def refuse_code(composed: Composed) -> None:
    """Raises InputError if an override sets one of these settings to a value that its mark covers."""
    values = settings(composed.config)
    named = [
        f"{key}={values[key]}"
        for key, field in dotted_fields().items()
        for mark in field.metadata
        if isinstance(mark, Trusted) and composed.origins[key] == "override" and mark.covers(values[key])
    ]
    if named:
        raise InputError(
            expected="overrides that name no code, command or receiver of credentials, and end no protection",
            seen=", ".join(named),
            where="parameter `overrides` of the flow run",
            fix="set them in a recipe, a .yaml file in the folder in which `rollforward deploy` was run",
        )
