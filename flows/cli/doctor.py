"""The command doctor."""

import argparse
import os
import sys

from flows.cli.base import Commands, add_command
from flows.home import prepare_home
from rl_core.config.compose import compose
from rl_core.console import Console


def register(commands: Commands) -> None:
    """Adds the command."""
    text = "Check versions, devices, ports, disk, storage, servers and leftovers; say what to do about each problem."
    sub = add_command(commands, "doctor", doctor, text)
    sub.add_argument("recipe", metavar="RECIPE", nargs="?", help="check what a run of this recipe needs too")
    sub.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that differ from the recipe")


def doctor(options: argparse.Namespace, console: Console) -> int:
    """Prints every finding; returns 2 when one of them is a problem."""
    sys.path.append(os.getcwd())  # where a run finds functions of the user's own
    composed = compose(options.recipe, options.overrides) if options.recipe else None
    home = prepare_home(verbose=False)
    from flows.cli.doctor_checks import findings

    levels = []
    for finding in findings(home, composed):
        console.finding(finding.level, finding.what, finding.seen, "" if finding.level == "ok" else finding.fix)
        levels.append(finding.level)
    problems, warnings = levels.count("problem"), levels.count("warning")
    console.note(f"problems: {problems}, warnings: {warnings}" if problems or warnings else "all is well")
    return 2 if problems else 0
