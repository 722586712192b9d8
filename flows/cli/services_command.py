"""Commands on services: up, down, deploy."""

import argparse
import os
from pathlib import Path

from flows.cli.base import Commands, add_command
from flows.home import prepare_home
from rl_core.console import Console


def register(commands: Commands) -> None:
    """Adds the commands."""
    text = "Start a Prefect server, a worker and an MLflow server on this machine, those that do not run yet."
    sub = add_command(commands, "up", up, text)
    sub.add_argument(
        "--prefect-port", type=int, metavar="P", help="port of Prefect's server (default: that of before, or 4200)"
    )
    sub.add_argument(
        "--mlflow-port", type=int, metavar="P", help="port of MLflow's server (default: that of before, or 5000)"
    )
    add_command(commands, "down", down, "Cancel the flow runs of this machine and end what `up` has started.")
    text = "Put work pool, deployments, schedules and automations on a Prefect server; what is there is updated."
    sub = add_command(commands, "deploy", deploy, text)
    sub.add_argument("file", nargs="?", type=Path, help="deployments (default: deployments/prefect.yaml)")
    sub.add_argument("--server", metavar="URL", help="API of the server (default: the one of `up`, PREFECT_API_URL)")


def up(options: argparse.Namespace, console: Console) -> None:
    """Starts what does not run and prints what runs."""
    home = prepare_home(verbose=True)
    from flows.server import services
    from flows.server.service_file import running_services

    there = running_services(home)
    running = services.up(home, options.prefect_port, options.mlflow_port, console.note)
    new = [name for name in running if name not in there]
    console.table(services.table(running), f"Services of {home}" if new else f"Services of {home}, all ran already")
    console.table(
        [
            ("for `prefect`", f"export PREFECT_API_URL={running['prefect'].address}"),
            ("Prefect's pages", running["prefect"].address.removesuffix("/api")),
            ("MLflow's pages", running["mlflow"].address),
            ("deployments", "rollforward deploy"),
            ("to end all", "rollforward down"),
        ],
        "Next",
    )


def down(options: argparse.Namespace, console: Console) -> None:
    """Ends everything and prints what was ended."""
    home = prepare_home(verbose=True)
    from flows.server import services

    ended = services.down(home, console.note)
    console.table([(str(i), what) for i, what in enumerate(ended, 1)] or [("none", "nothing ran")], "Ended")


def deploy(options: argparse.Namespace, console: Console) -> None:
    """Applies the files of the folder `deployments`."""
    prepare_home(verbose=True)
    from flows.server.services import find_server

    os.environ["PREFECT_API_URL"] = api = find_server(options.server)
    from flows.server.deploy import deploy as apply

    console.table(apply(options.file), f"Deployed to {api}")
