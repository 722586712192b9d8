"""A person's promotion of a version, as a deployment: it holds no GPU while it waits for one."""

from prefect import flow

from flows.home import open_registry


@flow(name="promote", flow_run_name="{version}", persist_result=False)
def promote(
    version: int | str, model: str | None = None, approve: bool = False, force: bool = False
) -> dict[str, str | None]:
    """Makes a version or alias the champion.

    Args:
        version: number or alias. model: registered model; the only one there is when it is not given.
        approve: the word that a version waits for whose gate asks for a person's. force: overrule a gate that refused.
    """
    registry = open_registry(model, verbose=True)
    old, new = registry.promote_by_hand(str(version), approve, force)
    return {"model": registry.name, "before": old, "champion": new}
