"""The command `rollforward`."""

import argparse
import atexit
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

import tasks  # noqa: F401  imported before the working directory, which may have its own `tasks`, is added to sys.path
from flows.cli import doctor, inspect_runs, models, run, serve, services_command
from flows.cli.run import Terminated
from rl_core.console import Console
from rl_core.credentials import without_credentials
from rl_core.errors import InputError, RollforwardError

MODULES = (run, inspect_runs, models, serve, services_command, doctor)
"""Command modules, in the order of the help text."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0, 1 (failure), 2 (user error), 130 (SIGINT) or 143 (SIGTERM)."""
    codes: list[int] = []
    if arguments is None:
        atexit.register(_end_process, codes)  # runs after the handlers of what is imported later
    options = _parse(arguments)
    console = Console()
    code = _execute(options, console)
    if code and options.resume_hint:
        console.note("to resume from the last committed step:")
        console.note(options.resume_hint)
    codes.append(code)
    return code


def _end_process(codes: Sequence[int]) -> None:
    """Ends the process without taking its modules and objects apart, which takes seconds after a run."""
    if codes:
        code = codes[0]
        logging.shutdown()  # its own handler, registered before this one, does not run
        for stream in (sys.stdout, sys.stderr):
            try:
                with suppress(BrokenPipeError, ValueError):  # the reader is gone
                    stream.flush()
            except OSError:  # the disk is full
                code = code or 1
        os._exit(code)


def _execute(options: argparse.Namespace, console: Console) -> int:
    """Executes the command, prints its errors and returns the exit code."""
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
        print(without_credentials(traceback.format_exc()), file=sys.stderr, end="")
        return 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the options; unlike plain argparse, accepts settings both before and after flags."""
    parser = _parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    options, rest = parser.parse_known_args(words[:end])
    if "passed_on" in options:  # arguments for the program that replaces the command
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
    parser.set_defaults(resume_hint="")  # set by a command that can be resumed, printed if it fails
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in MODULES:
        module.register(commands)
    return parser
