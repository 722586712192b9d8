"""The file in the home folder that lists the services started by `rollforward up`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rl_core.errors import InputError
from rl_core.runtime.process import Process
from rl_core.storage.filesystem import replacing
from rl_core.storage.manifest import parse_json

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
    """The services started by `rollforward up`, by name; some may have ended since.

    Raises InputError if the file is damaged.
    """
    file = home / SERVICES
    try:
        return {
            name: Service(Process(**entry["process"]), entry["address"], entry["log"])
            for name, entry in parse_json(file.read_bytes()).items()
        }
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            expected="the services started by `rollforward up`, as JSON",
            seen=f"{type(error).__name__}: {error}",
            where=str(file),
            fix="end the processes of `prefect` and `mlflow` that belong to this home folder, then remove the file",
        ) from error


def running_services(home: Path) -> dict[str, Service]:
    """The recorded services whose process is alive, by name."""
    return {name: service for name, service in recorded_services(home).items() if service.process.find()}


def write_services(home: Path, services: dict[str, Service]) -> None:
    """Records the services of this home folder; an empty mapping removes the file."""
    file = home / SERVICES
    if not services:
        file.unlink(missing_ok=True)
        return
    with replacing(file) as draft:
        draft.write(json.dumps({name: asdict(service) for name, service in services.items()}, indent=1).encode())
