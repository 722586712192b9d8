"""The command `rollforward doctor`."""

import argparse
import os
import sys

from flows.cli.base import Commands, add_command
from flows.home import prepare_home
from rl_core.config.compose import compose
from rl_core.console import Console


def register(commands: Commands) -> None:
    """Adds the command."""
    text = (
        "Check versions, devices, ports, disk, storage, servers and leftovers of dead runs; suggest fixes for problems."
    )
    sub = add_command(commands, "doctor", doctor, text)
    sub.add_argument("recipe", metavar="RECIPE", nargs="?", help="also check the requirements of this recipe")
    sub.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that override the recipe")


def doctor(options: argparse.Namespace, console: Console) -> int:
    """Prints all findings; returns 2 if one of them is a problem."""
    sys.path.append(os.getcwd())  # as in a run, for the user's functions
    composed = compose(options.recipe, options.overrides) if options.recipe else None
    home = prepare_home(verbose=False)
    from flows.cli.doctor_checks import findings

    levels = []
    for finding in findings(home, composed):
        console.finding(finding.level, finding.what, finding.seen, "" if finding.level == "ok" else finding.fix)
        levels.append(finding.level)
    problems, warnings = levels.count("problem"), levels.count("warning")
    console.note(f"problems: {problems}, warnings: {warnings}" if problems or warnings else "no problems found")
    return 2 if problems else 0
