"""The way back: the champion before this one is champion again."""

from prefect import flow

from flows.home import open_registry


@flow(name="rollback", persist_result=False)
def rollback(model: str | None = None) -> dict[str, str]:
    """Makes the version with the alias previous the champion, and the champion the previous one.

    Args:
        model: registered model; the only one there is when it is not given.
    """
    registry = open_registry(model, verbose=True)
    old, new = registry.rollback()
    return {"model": registry.name, "before": old, "champion": new}
