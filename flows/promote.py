"""Flow: manual promotion of a version, separate from training so that no GPU is held while a version waits."""

from prefect import flow

from flows.home import open_registry


@flow(name="promote", flow_run_name="{version}", persist_result=False)
def promote(
    version: int | str, model: str | None = None, approve: bool = False, force: bool = False
) -> dict[str, str | None]:
    """Makes a version or alias the champion.

    Args:
        version: number or alias. model: registered model, by default the only one.
        approve: approve a version awaiting approval. force: override a refusal of the gate.
    """
    registry = open_registry(model, verbose=True)
    old, new = registry.promote_manually(str(version), approve, force)
    return {"model": registry.name, "before": old, "champion": new}
