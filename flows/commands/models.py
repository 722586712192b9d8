"""Commands on registered models: models, promote, ui."""

import argparse
import os
import sys

from flows.commands.base import Commands, add_command, add_registry_options, open_registry, prepare_home
from rl_core.console import Console


def register(commands: Commands) -> None:
    """Adds the commands."""
    add_registry_options(add_command(commands, "models", models, "List the registered versions of a model."))
    sub = add_command(commands, "promote", promote, "Make a version the champion.")
    sub.add_argument("version", help="number or alias of a version")
    add_registry_options(sub)
    sub = add_command(commands, "ui", ui, "Serve MLflow's pages of this home folder.")
    sub.add_argument("--port", type=int, default=5000)


def models(options: argparse.Namespace, console: Console) -> None:
    """Prints the versions of a registered model."""
    registry = open_registry(options)
    rows = [
        (
            f"version {info.version}",
            f"{'' if info.score_after is None else f'score {info.score_after:.3f}'}  step {info.step}  run {info.run}"
            f"  {info.created:%Y-%m-%d %H:%M}  {' '.join(info.aliases)}",
        )
        for info in registry.versions()
    ]
    console.table(rows or [("none", "register one with `rollforward run`")], f"Model {registry.name}")


def promote(options: argparse.Namespace, console: Console) -> None:
    """Moves the alias champion."""
    registry = open_registry(options)
    old, new = registry.promote(options.version)
    console.note(f"champion of {registry.name}: version {new}" + (f", before that version {old}" if old else ""))


def ui(options: argparse.Namespace, console: Console) -> None:
    """Replaces this process by MLflow's server on the home folder's database."""
    home = prepare_home(verbose=True)
    from flows.ports import check_port
    from tasks.tracking import default_tracking_uri

    check_port(options.port)
    console.note(f"MLflow's pages: http://127.0.0.1:{options.port}  (Ctrl-C ends)")
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", default_tracking_uri(home)]
    artifacts = ["--default-artifact-root", (home / "mlartifacts").as_uri()]
    os.execv(sys.executable, [*command, *artifacts, "--host", "127.0.0.1", "--port", str(options.port)])
