"""Commands for services: up, down, deploy."""

import argparse
import os
from pathlib import Path

from flows.cli.base import Commands, add_command, shown_secret
from flows.home import prepare_home, use_servers
from flows.server.service_file import SERVERS_SECRET
from rl_core.console import Console
from rl_core.runtime.private import secret_file
from tasks.tracking.login import USER


def register(commands: Commands) -> None:
    """Adds the commands."""
    text = "Start a Prefect server, a worker and an MLflow server on this machine, unless they are running."
    sub = add_command(commands, "up", up, text)
    sub.add_argument(
        "--prefect-port", type=int, metavar="P", help="port of the Prefect server (default: the previous port, or 4200)"
    )
    sub.add_argument(
        "--mlflow-port", type=int, metavar="P", help="port of the MLflow server (default: the previous port, or 5000)"
    )
    add_command(commands, "down", down, "Cancel the flow runs of this machine and stop the services started by `up`.")
    text = "Create or update work pool, deployments, schedules and automations on a Prefect server."
    sub = add_command(commands, "deploy", deploy, text)
    sub.add_argument("file", nargs="?", type=Path, help="deployments file (default: deployments/prefect.yaml)")
    sub.add_argument(
        "--server", metavar="URL", help="API of the server (default: PREFECT_API_URL, or the server started by `up`)"
    )


def up(options: argparse.Namespace, console: Console) -> None:
    """Starts the missing services and prints all of them."""
    home = prepare_home(verbose=True)
    from flows.server import services
    from flows.server.service_file import running_services

    before = running_services(home)
    running = services.up(home, options.prefect_port, options.mlflow_port, console.note)
    started = running.keys() - before.keys()
    console.table(services.service_rows(running), f"Services of {home}" + ("" if started else " (already running)"))
    console.table(
        [
            (
                "for `prefect`",
                f"export PREFECT_API_URL={running['prefect'].address}\n"
                f"export PREFECT_API_AUTH_STRING=$(cat {secret_file(home, SERVERS_SECRET)})",
            ),
            ("Prefect UI", f"{running['prefect'].address.removesuffix('/api')}\n{shown_secret(home, None)}"),
            ("MLflow UI", f"{running['mlflow'].address}\n{shown_secret(home, USER)}"),
            ("deployments", "rollforward deploy"),
            ("stop all", "rollforward down"),
        ],
        "Next",
    )


def down(options: argparse.Namespace, console: Console) -> None:
    """Stops everything and prints what was stopped."""
    home = prepare_home(verbose=True)
    from flows.server import services

    stopped = services.down(home, console.note)
    console.table([(str(i), what) for i, what in enumerate(stopped, 1)] or [("none", "nothing was running")], "Stopped")


def deploy(options: argparse.Namespace, console: Console) -> None:
    """Applies the files of the folder `deployments`."""
    home = prepare_home(verbose=True)
    from flows.server.services import find_server

    os.environ["PREFECT_API_URL"] = api = find_server(options.server)
    use_servers(home)
    from flows.server.deploy import deploy as apply

    console.table(apply(options.file), f"Deployed to {api}")
