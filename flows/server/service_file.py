"""The file in the home folder that lists the services started by `rollforward up`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rl_core.runtime.process import Process

SERVICES = "services.json"
SERVERS_SECRET = "servers"
"""Name of the secret that the servers of a home folder require."""


@dataclass(frozen=True)
class Service:
    """A service of this home folder: its process, its address (empty for the worker), and its log file."""

    process: Process
    address: str
    log: str


def recorded_services(home: Path) -> dict[str, Service]:
    """The services started by `rollforward up`, by name; some may have ended since."""
    try:
        text = (home / SERVICES).read_text()
    except FileNotFoundError:
        return {}
    return {
        name: Service(Process(**entry["process"]), entry["address"], entry["log"])
        for name, entry in json.loads(text).items()
    }


def running_services(home: Path) -> dict[str, Service]:
    """The recorded services whose process is alive, by name."""
    return {name: service for name, service in recorded_services(home).items() if service.process.find()}


def write_services(home: Path, services: dict[str, Service]) -> None:
    """Records the services of this home folder; an empty mapping removes the file."""
    file = home / SERVICES
    if not services:
        file.unlink(missing_ok=True)
        return
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps({name: asdict(service) for name, service in services.items()}, indent=1))
    draft.replace(file)
