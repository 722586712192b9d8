"""Helpers shared by the command modules."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.home import open_registry
from flows.server.service_file import SERVERS_SECRET
from rl_core.config.compose import recipe_names
from rl_core.runtime.private import read_secret, secret_file

if TYPE_CHECKING:
    from tasks.registry.registry import Registry

Commands = Any
"""What argparse's `add_subparsers` returns."""

# Prefect, Ray, torch and MLflow are imported inside the functions that need them: their environment must be set first,
# and commands that only print must start quickly.


def add_command(commands: Commands, name: str, command: object, text: str) -> argparse.ArgumentParser:
    """Adds a command that calls `command(options, console)`, which returns the exit code, or None for 0."""
    sub: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    sub.set_defaults(command=command)
    return sub


def add_settings(sub: argparse.ArgumentParser) -> None:
    """Adds the arguments of a command that takes a recipe and settings."""
    sub.add_argument("recipe", help=f"name ({', '.join(recipe_names())}) or path of a .yaml file")
    sub.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that override the recipe")


def add_registry_options(sub: argparse.ArgumentParser, default: str = "the only one") -> None:
    """Adds the options of a command that works on a registered model; `default` describes what it is without one."""
    sub.add_argument("--model", help=f"registered model (default: {default})")
    sub.add_argument("--tracking-uri", help="MLflow server (default: the database file in the home folder)")


def registry_of(options: argparse.Namespace) -> "Registry":
    """The registered model selected by the options."""
    return open_registry(options.model, options.tracking_uri)


def shown_secret(home: Path, user: str | None) -> str:
    """What to type where a page of the home folder's servers asks for it; without a terminal, where it is kept."""
    terminal = sys.stdout.isatty()
    secret = read_secret(home, SERVERS_SECRET) if terminal else f"the output of: {_cat(home)}"
    return f"user {user}, password {secret}" if user else f"password {secret}"


def _cat(home: Path) -> str:
    return shlex.join(["cat", str(secret_file(home, SERVERS_SECRET))])
