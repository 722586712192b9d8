"""A person's promotion of a version, as a deployment: it holds no GPU while it waits for one."""

from prefect import flow

from flows.commands.base import prepare_home
from tasks.registry import Registry, only_model
from tasks.tracking import check_tracking, default_tracking_uri


@flow(name="promote", flow_run_name="{version}", persist_result=False)
def promote(
    version: int | str, model: str | None = None, approve: bool = False, force: bool = False
) -> dict[str, str | None]:
    """Makes a version or alias the champion.

    Args:
        version: number or alias. model: registered model; the only one there is when it is not given.
        approve: the word that a version waits for whose gate asks for a person's. force: overrule a gate that refused.
    """
    registry = open_registry(model)
    old, new = registry.promote_by_hand(str(version), approve, force)
    return {"model": registry.name, "before": old, "champion": new}


def open_registry(model: str | None) -> Registry:
    """The registered model of that name, or the only one there is."""
    uri = default_tracking_uri(prepare_home(verbose=True))
    check_tracking(uri)
    return Registry(uri, model or only_model(uri))
