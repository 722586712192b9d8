"""Check of a weight push: every weight of the engine must be written."""

from collections.abc import Collection

from rl_core.errors import TrainingError


def require_all(missing: Collection[str], version: int) -> None:
    """Raises TrainingError naming weights of the engine that a push did not write."""
    if missing:
        raise TrainingError(
            f"the push of weights version {version} did not update {len(missing)} weights of the rollout engine, "
            f"such as {', '.join(sorted(missing)[:3])}"
        )
