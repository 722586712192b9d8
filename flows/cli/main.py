"""The command `rollforward`."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

import tasks  # noqa: F401  found before the working directory, which comes to be searched too, has one of the name
from flows.cli import doctor, inspect_runs, models, run, serve, services_command
from flows.cli.run import Terminated
from rl_core.console import Console
from rl_core.errors import InputError, RollforwardError

MODULES = (run, inspect_runs, models, serve, services_command, doctor)
"""Modules of commands, in the order of the help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0, 1 (failed), 2 (a person has to change something), 130 or 143 (told to stop)."""
    options = _parse(arguments)
    console = Console()
    code = _done(options, console)
    if code and options.resume_hint:
        console.note("this continues from the last committed step:")
        console.note(options.resume_hint)
    return code


def _done(options: argparse.Namespace, console: Console) -> int:
    """The exit code of the command, which has been carried out; errors are shown."""
    try:
        return int(options.command(options, console) or 0)
    except InputError as error:
        console.error(error)
        return 2
    except RollforwardError as error:
        console.failure(error)
        return 1
    except KeyboardInterrupt as interrupt:
        console.note("interrupted")
        return 143 if isinstance(interrupt, Terminated) else 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception:
        traceback.print_exc()
        return 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; settings may stand before and after flags, which argparse alone does not allow."""
    parser = _parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    options, rest = parser.parse_known_args(words[:end])
    if "passed_on" in options:  # for the program that the command becomes
        options.passed_on, end = words[end + 1 :], len(words)
    rest += words[end:]
    if rest and ("overrides" not in options or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollforward", description="Reinforcement-learning post-training of language models."
    )
    parser.set_defaults(resume_hint="")  # a command line, for when a command that had begun something does not end it
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in MODULES:
        module.register(commands)
    return parser
