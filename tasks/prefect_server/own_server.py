"""The Prefect server that a run starts for itself if none is configured: it ends with the run, so it has no pages."""

import os

OWN_SERVER = "ROLLFORWARD_OWN_PREFECT_SERVER"
"""Variable with the API URL of the run's own server."""


def has_pages() -> bool:
    """Whether `PREFECT_API_URL` names a server that outlives this run."""
    from prefect.settings import PREFECT_API_URL

    url = PREFECT_API_URL.value()
    return bool(url) and url != os.environ.get(OWN_SERVER)
