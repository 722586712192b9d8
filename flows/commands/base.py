"""What the modules of commands share."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.config.compose import recipe_names
from rl_core.credentials import HOW, addresses_with_credentials
from rl_core.environment import home_folder, prepare_environment
from rl_core.errors import InputError

if TYPE_CHECKING:
    from tasks.registry import Registry

Commands = Any
"""What argparse's `add_subparsers` returns."""

# Imports of Prefect, Ray, torch and MLflow stay inside the functions that need them: the environment has to be set
# first, and commands that only print must answer at once.


def add_command(commands: Commands, name: str, command: object, text: str) -> argparse.ArgumentParser:
    """A command that calls `command(options, console)`, which returns the exit code or None for 0."""
    sub: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    sub.set_defaults(command=command)
    return sub


def add_settings(sub: argparse.ArgumentParser) -> None:
    """The arguments of a command that takes a recipe and settings."""
    sub.add_argument("recipe", help=f"name ({', '.join(recipe_names())}) or path of a .yaml file")
    sub.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that differ from the recipe")


def add_registry_options(sub: argparse.ArgumentParser) -> None:
    """The options of a command that works on a registered model."""
    sub.add_argument("--model", help="registered model (default: the only one there is)")
    sub.add_argument("--tracking-uri", help="MLflow server (default: the file in the home folder)")


def open_registry(options: argparse.Namespace) -> "Registry":
    """The registered model that the options name."""
    home = prepare_home(verbose=False)
    from tasks.registry import Registry, only_model
    from tasks.tracking import check_tracking, default_tracking_uri

    uri = options.tracking_uri or default_tracking_uri(home)
    check_tracking(uri)
    return Registry(uri, options.model or only_model(uri))


def prepare_home(verbose: bool) -> Path:
    """The home folder, made, with the environment that the libraries need.

    Raises InputError when it cannot be written, and for variables whose addresses have credentials: libraries write
    those into logs, errors and databases.
    """
    home = home_folder()
    if told := addresses_with_credentials():
        raise InputError("addresses without credentials", f"some in {', '.join(told)}", "environment", HOW)
    from tasks.tracking import quiet_mlflow

    try:
        home.mkdir(parents=True, exist_ok=True)
        prepare_environment(home, verbose)
    except OSError as error:
        raise InputError(
            "a home folder that can be written", str(error), f"ROLLFORWARD_HOME={home}", "set ROLLFORWARD_HOME=FOLDER"
        ) from error
    quiet_mlflow()
    return home
