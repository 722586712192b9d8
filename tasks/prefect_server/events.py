"""Events of Prefect: what happens to models, for automations of others to act on."""

import asyncio
import logging
from typing import Any

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0


def emit(name: str, model: str, payload: dict[str, Any]) -> None:
    """Sends the event `name` about a registered model, as the resource `rollforward.model.MODEL`.

    Does nothing where no Prefect server is configured. Takes at most 5 s and never raises: a move counts, whoever hears
    of it.
    """
    from prefect.settings import PREFECT_API_URL

    if not PREFECT_API_URL.value():
        return
    try:
        asyncio.run(asyncio.wait_for(_send(name, model, payload), TIMEOUT_S))
    except Exception as error:
        logger.warning("The event %s of %s was not sent: %s", name, model, error or type(error).__name__)


async def _send(name: str, model: str, payload: dict[str, Any]) -> None:
    from prefect.events import Event, RelatedResource, Resource
    from prefect.events.clients import get_events_client
    from prefect.runtime import flow_run

    related = []
    if flow_run.id:
        role = {"prefect.resource.id": f"prefect.flow-run.{flow_run.id}", "prefect.resource.role": "flow-run"}
        related = [RelatedResource.model_validate(role)]
    resource = Resource.model_validate({"prefect.resource.id": f"rollforward.model.{model}"})
    # Confirmed one by one: the process may end right after it.
    async with get_events_client(reconnection_attempts=0, checkpoint_every=1) as client:
        await client.emit(Event(event=name, resource=resource, related=related, payload=payload))
