"""Prefect events about registered models, as triggers for automations."""

import asyncio
import logging
from typing import Any

from tasks.prefect_server.own_server import has_pages

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0


def emit(name: str, model: str, payload: dict[str, Any]) -> None:
    """Sends the event `name` about a registered model, as the resource `rollforward.model.MODEL`.

    Does nothing if no Prefect server is configured. Takes at most `TIMEOUT_S` and never raises, so that a missing
    server cannot undo an alias move.
    """
    if not has_pages():
        return
    try:
        asyncio.run(asyncio.wait_for(_send(name, model, payload), TIMEOUT_S))
    except Exception as error:
        logger.warning("Event %s for model %s was not sent: %s", name, model, error or type(error).__name__)


async def _send(name: str, model: str, payload: dict[str, Any]) -> None:
    from prefect.events import Event, RelatedResource, Resource
    from prefect.events.clients import get_events_client
    from prefect.runtime import flow_run

    related = []
    if flow_run.id:
        role = {"prefect.resource.id": f"prefect.flow-run.{flow_run.id}", "prefect.resource.role": "flow-run"}
        related = [RelatedResource.model_validate(role)]
    resource = Resource.model_validate({"prefect.resource.id": f"rollforward.model.{model}"})
    # Each event is confirmed before the next, because the process may end right after it.
    async with get_events_client(reconnection_attempts=0, checkpoint_every=1) as client:
        await client.emit(Event(event=name, resource=resource, related=related, payload=payload))
