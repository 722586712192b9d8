"""The command `rollforward`."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rl_core.config.compose import compose, recipe_names
from rl_core.config.render import render
from rl_core.console import Console, duration
from rl_core.environment import home_folder, prepare_environment, prepare_libraries
from rl_core.errors import InputError, RollforwardError

# Imports of Prefect, Ray, torch and MLflow stay inside the functions that need them: the environment has to be set
# first, and commands that only print must answer at once.


class Terminated(KeyboardInterrupt):
    """SIGTERM: a plain kill asks like Ctrl-C, so stages end, workers stop and MLflow learns that the run was killed."""


def _terminate(_number: int, _frame: object) -> None:
    raise Terminated


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0, 1 (failed), 2 (a person has to change something), 130 or 143 (told to stop)."""
    options = _parse(arguments)
    console = Console()
    try:
        return int(options.command(options, console) or 0)
    except InputError as error:
        console.error(error)
        return 2
    except RollforwardError as error:
        console.failure(error)
        return 1
    except KeyboardInterrupt as interrupt:
        console.note("interrupted; the same command with --resume continues from the last committed step")
        return 143 if isinstance(interrupt, Terminated) else 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; settings may stand before and after flags, which argparse alone does not allow."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and ("overrides" not in options or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollforward", description="Reinforcement-learning post-training of language models."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: object, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    def add_settings(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("recipe", help=f"name ({', '.join(recipe_names())}) or path of a .yaml file")
        sub.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that differ from the recipe")

    sub = add("run", run, "Train, evaluate, register and promote by a recipe.")
    add_settings(sub)
    how = sub.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="continue the run of this recipe and these settings")
    how.add_argument("--run", metavar="NAME", help="begin the run NAME, or continue it when it exists")
    how.add_argument("--new", action="store_true", help="begin another run with the same settings")
    sub.add_argument(
        "--keep-data", action="store_true", help="continue on the run's own rows, though their files have changed"
    )
    sub.add_argument("-v", "--verbose", action="store_true", help="show what the libraries log")
    sub = add("config", config, "Print the settings of a recipe, where each comes from, and the sizes that follow.")
    add_settings(sub)
    data = commands.add_parser("data", help="Look at rows.", description="Look at rows.")
    _add_data_check(data.add_subparsers(required=True, metavar="COMMAND"))
    sub = add("replay", replay, "Compute a committed step again from its rollouts, and compare with what was trained.")
    sub.add_argument("run", metavar="RUN", help="name of a run, or its folder or URL")
    sub.add_argument("step", metavar="STEP", type=int, help="a committed step")
    sub.add_argument(
        "--set", nargs="+", action="extend", default=[], dest="settings", metavar="a.b=value",
        help="show what other settings of algorithm, correction or actor would have given",
    )  # fmt: skip
    sub = add("models", models, "List the registered versions of a model.")
    _registry_options(sub)
    sub = add("promote", promote, "Make a version the champion.")
    sub.add_argument("version", help="number or alias of a version")
    _registry_options(sub)
    sub = add("ui", ui, "Serve MLflow's pages of this home folder.")
    sub.add_argument("--port", type=int, default=5000)
    return parser


def _add_data_check(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "Show what is in the rows of a recipe or of files, and what would keep a run with them from starting."
    sub = commands.add_parser("check", help=text, description=text)
    sub.set_defaults(command=check_data)
    sub.add_argument("target", metavar="TARGET", help="a recipe, or a file, folder, pattern or URL of rows")
    sub.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that differ from the recipe")
    sub.add_argument("--val", metavar="PATH", help="held-out rows, where TARGET is a path")
    sub.add_argument("--html", metavar="FILE", help="write what was found as a page too")


def _registry_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--model", help="registered model (default: the only one there is)")
    sub.add_argument("--tracking-uri", help="MLflow server (default: the file in the home folder)")


def run(options: argparse.Namespace, console: Console) -> int:
    """Runs the flow `post_train` in this process."""
    if options.keep_data and not (options.resume or options.run):
        raise InputError("a run whose rows are kept", "--keep-data alone", "command line", "add --resume or --run NAME")
    sys.path.append(os.getcwd())  # functions of the user's own are found beside the recipe
    composed = compose(options.recipe, options.overrides)
    home = _prepare(options.verbose)
    from tasks.runs import find_run

    find_run(composed, home, options.run, options.resume, options.new)
    from flows.preflight import preflight

    preflight(composed, home)
    from flows.post_train import post_train

    signal.signal(signal.SIGTERM, _terminate)
    start = time.monotonic()
    result = post_train(
        options.recipe, options.overrides, options.run, options.resume, options.new, options.verbose, options.keep_data
    )
    console.table(_summary(result, time.monotonic() - start), f"Run {result['run']}")
    return 0


def _summary(result: dict, seconds: float) -> list[tuple[str, str]]:
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
        ("kept in", result["url"]),
        ("MLflow's pages", "rollforward ui"),
        ("versions", f"rollforward models --model {result['model']}{where}"),
    ]


def config(options: argparse.Namespace, console: Console) -> None:
    """Prints the resolved settings; starts nothing."""
    print(render(compose(options.recipe, options.overrides)))


def check_data(options: argparse.Namespace, console: Console) -> int:
    """Looks at the rows; starts nothing."""
    prepare_libraries()
    from flows.data_check import data_check

    return data_check(options.target, options.overrides, options.val, options.html, console)


def replay(options: argparse.Namespace, console: Console) -> int:
    """Computes a step again; reads only."""
    home = home_folder()
    from flows.replay import replay_step

    return replay_step(home, options.run, options.step, options.settings, console)


def models(options: argparse.Namespace, console: Console) -> None:
    """Prints the versions of a registered model."""
    registry = _registry(options)
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
    registry = _registry(options)
    old, new = registry.promote(options.version)
    console.note(f"champion of {registry.name}: version {new}" + (f", before that version {old}" if old else ""))


def ui(options: argparse.Namespace, console: Console) -> None:
    """Replaces this process by MLflow's server on the home folder's database."""
    home = _prepare(verbose=True)
    from flows.ports import check_port
    from tasks.tracking import default_tracking_uri

    check_port(options.port)
    console.note(f"MLflow's pages: http://127.0.0.1:{options.port}  (Ctrl-C ends)")
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", default_tracking_uri(home)]
    artifacts = ["--default-artifact-root", (home / "mlartifacts").as_uri()]
    os.execv(sys.executable, [*command, *artifacts, "--host", "127.0.0.1", "--port", str(options.port)])


def _registry(options: argparse.Namespace):  # noqa: ANN202 - the class must not be imported before the environment
    home = _prepare(verbose=False)
    from tasks.registry import Registry, only_model
    from tasks.tracking import check_tracking, default_tracking_uri

    uri = options.tracking_uri or default_tracking_uri(home)
    check_tracking(uri)
    return Registry(uri, options.model or only_model(uri))


def _prepare(verbose: bool) -> Path:
    home = home_folder()
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
