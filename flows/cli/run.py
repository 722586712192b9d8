"""Commands for recipes, rows and steps: run, config, data check, replay."""

import argparse
import os
import shlex
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli.base import Commands, add_command, add_settings
from flows.home import home_folder, prepare_home, prepare_libraries
from rl_core.config.compose import Composed, compose
from rl_core.config.render import render
from rl_core.console import Console, duration
from rl_core.errors import InputError, RollforwardError
from rl_core.runtime.guardian import start_guardian

if TYPE_CHECKING:
    from flows.server.own_server import OwnServer
    from rl_core.storage.store import Store


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C: stages end, workers stop and the MLflow run is closed as KILLED."""


def _terminate(_number: int, _frame: object) -> None:
    raise Terminated


def register(commands: Commands) -> None:
    """Adds the commands."""
    sub = add_command(commands, "run", run, "Train, evaluate, register and promote a model according to a recipe.")
    add_settings(sub)
    how = sub.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="resume the run of this recipe and these settings")
    how.add_argument("--run", metavar="NAME", help="start the run NAME, or resume it if it exists")
    how.add_argument("--new", action="store_true", help="start another run with the same settings")
    sub.add_argument(
        "--keep-data", action="store_true", help="resume with the run's stored rows even if their files have changed"
    )
    sub.add_argument("-v", "--verbose", action="store_true", help="show the logs of the libraries")
    text = "Print the settings of a recipe, their origins, and the sizes derived from them."
    add_settings(add_command(commands, "config", config, text))
    data = commands.add_parser("data", help="Check rows.", description="Check rows.")
    _add_data_check(data.add_subparsers(required=True, metavar="COMMAND"))
    text = "Recompute a committed or failed step from its rollouts and compare it with the training step."
    sub = add_command(commands, "replay", replay, text)
    sub.add_argument("run", metavar="RUN", help="name, folder or URL of a run")
    sub.add_argument("step", metavar="STEP", type=int, help="a committed step, or the failed one")
    sub.add_argument(
        "--set", nargs="+", action="extend", default=[], dest="settings", metavar="a.b=value",
        help="show the result under other settings of algorithm, correction or actor",
    )  # fmt: skip


def _add_data_check(commands: Commands) -> None:
    text = "Summarise the rows of a recipe or of files, and list every problem that would stop a run."
    sub = add_command(commands, "check", check_data, text)
    sub.add_argument("target", metavar="TARGET", help="a recipe, or a file, folder, pattern or URL of rows")
    sub.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that override the recipe")
    sub.add_argument("--val", metavar="PATH", help="held-out rows, if TARGET is a path")
    sub.add_argument("--html", metavar="FILE", help="also write the report as an HTML page")


def run(options: argparse.Namespace, console: Console) -> int:
    """Runs the flow `post_train` in this process."""
    if options.keep_data and not (options.resume or options.run):
        raise InputError(
            expected="a run to resume with its stored rows",
            seen="--keep-data alone",
            where="command line",
            fix="add --resume or --run NAME",
        )
    signal.signal(signal.SIGTERM, _terminate)
    sys.path.append(os.getcwd())  # for the user's functions, next to the recipe
    start = time.monotonic()
    composed = compose(options.recipe, options.overrides)
    home = prepare_home(options.verbose)
    from flows.first_checks import check_prefect, watch_for_hang
    from tasks.runs.open_run import has_started
    from tasks.runs.run import committed_step

    check_prefect()
    with watch_for_hang(composed.config):
        store, server = _check(options, composed, home)
    try:
        result = _run(options, composed, home, store, server)
    except (KeyboardInterrupt, RollforwardError) as error:
        with suppress(RollforwardError):  # storage may be unreachable
            step = committed_step(store)
            if isinstance(error, KeyboardInterrupt):
                console.note(f"stopped at step {step} of {composed.config.trainer.steps}")
            if not has_started(store) or (isinstance(error, InputError) and not step):
                options.resume_hint = ""  # nothing to resume from
        raise
    console.table(_summary(result, time.monotonic() - start), f"Run {result['run']}")
    return 0


def _check(options: argparse.Namespace, composed: Composed, home: Path) -> tuple["Store", "OwnServer | None"]:
    """The run's store, and the Prefect server that is starting for it; raises InputError before the run is made.

    The libraries that the last checks import take seconds, in which the server starts. It starts later if it may have
    to create or migrate its database, which must not be interrupted.
    """
    from flows.first_checks import check_rows, first_checks
    from flows.server.own_server import start_server
    from tasks.runs.open_run import find_run, has_started

    name, store = find_run(composed, home, options.run, options.resume, options.new)
    resuming = has_started(store)
    schemas = first_checks(composed.config, home, resuming)
    start_guardian()  # before any other process
    server = start_server(home)
    if not resuming:
        check_rows(composed.config, schemas)
    from flows.preflight import check_parts

    check_parts(composed.config, schemas, home)
    options.resume_hint = _resume_command(options, name)
    return store, server


def _run(
    options: argparse.Namespace, composed: Composed, home: Path, store: "Store", server: "OwnServer | None"
) -> dict[str, Any]:
    """Runs the stages as a flow; raises Terminated for SIGTERM, also where Prefect has handled it."""
    from flows.first_checks import watch_for_hang
    from flows.server.own_server import start_server
    from tasks.runs.open_run import open_run
    from tasks.session.workers import start_ray

    with watch_for_hang(composed.config):
        ray = start_ray(composed.config, home, store)
    server = server or start_server(home, new=True)
    from prefect.exceptions import TerminationSignal

    from flows.pipeline import run_as_flow, run_stages

    def stages() -> dict[str, Any]:
        with watch_for_hang(composed.config):
            opened = open_run(composed, home, options.run, options.resume, options.new)
        return run_stages(opened, options.verbose, options.keep_data, local_ray=ray)

    if server:
        server.wait()
    try:
        return run_as_flow(composed, options.overrides, stages)
    except TerminationSignal:
        raise Terminated from None


def _resume_command(options: argparse.Namespace, name: str) -> str:
    """The command that resumes a run."""
    flags = [flag for flag, given in (("--keep-data", options.keep_data), ("--verbose", options.verbose)) if given]
    return shlex.join(["rollforward", "run", options.recipe, *options.overrides, "--run", name, *flags])


def _summary(result: dict[str, Any], seconds: float) -> list[tuple[str, str]]:
    before, after = result["before"], result["after"]
    where = "" if result["tracking_uri"].startswith("sqlite") else f" --tracking-uri {result['tracking_uri']}"
    return [
        ("score, greedy", f"{before['greedy']:.3f} → {after['greedy']:.3f}"),
        ("score, sampled", f"{before['sampled']:.3f} → {after['sampled']:.3f}"),
        ("steps", str(result["step"])),
        ("time", duration(seconds)),
        ("model version", f"{result['model']} {result['version']}"),
        ("alias", ", ".join(result["aliases"]) or "none"),
        ("report", result["report"]),
        ("run folder", result["url"]),
        ("MLflow UI", "rollforward ui"),
        ("versions", f"rollforward models --model {result['model']}{where}"),
    ]


def config(options: argparse.Namespace, console: Console) -> None:
    """Prints the resolved settings; starts nothing."""
    print(render(compose(options.recipe, options.overrides)))


def check_data(options: argparse.Namespace, console: Console) -> int:
    """Checks the rows; starts nothing."""
    prepare_libraries()
    from flows.cli.data_check import data_check

    return data_check(options.target, options.overrides, options.val, options.html, console)


def replay(options: argparse.Namespace, console: Console) -> int:
    """Recomputes a step; reads only."""
    home = home_folder()
    from flows.cli.replay import replay_step

    return replay_step(home, options.run, options.step, options.settings, console)
