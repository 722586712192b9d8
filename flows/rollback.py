"""Flow: restores the previous champion."""

from prefect import flow

from flows.home import open_registry


@flow(name="rollback", persist_result=False)
def rollback(model: str | None = None) -> dict[str, str]:
    """Swaps the aliases `champion` and `previous`.

    Args:
        model: registered model, by default the only one.
    """
    registry = open_registry(model, verbose=True)
    old, new = registry.rollback()
    return {"model": registry.name, "before": old, "champion": new}
