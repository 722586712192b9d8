"""Commands that inspect runs: runs, status, report, compare."""

import argparse
import json
import os
import sys
import time
import webbrowser
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from flows.cli.base import Commands, add_command
from flows.home import home_folder, prepare_libraries
from rl_core.console import Console
from rl_core.errors import InputError
from rl_core.storage import run_files

if TYPE_CHECKING:
    from rl_core.storage.store import Store

WATCH_S = 2.0
"""Refresh interval of `status --watch`."""


def register(commands: Commands) -> None:
    """Adds the commands."""
    _add_root(add_command(commands, "runs", runs, "List runs with their progress and state."), True)
    sub = add_command(commands, "status", status, "Show a run's stage, step, rate, and what it is waiting for.")
    sub.add_argument("run", metavar="RUN", nargs="?", help="name, folder or URL (default: the most recently changed)")
    sub.add_argument("--watch", action="store_true", help="refresh every two seconds until the run ends")
    _add_root(sub, True)
    sub = add_command(commands, "report", report, "Show a run's report in the browser, also of an unfinished run.")
    sub.add_argument("run", metavar="RUN", help="name, folder or URL of a run")
    _add_root(sub)
    sub = add_command(commands, "compare", compare, "Show two runs side by side: settings, scores and curves.")
    sub.add_argument("runs", metavar="RUN", nargs=2, help="name, folder or URL of a run")
    sub.add_argument("--html", metavar="FILE", help="also write the comparison as an HTML page")
    _add_root(sub)


def _add_root(sub: argparse.ArgumentParser, with_json: bool = False) -> None:
    sub.add_argument("--root", metavar="URL", help="storage.root of the runs (default: the home folder)")
    if with_json:
        sub.add_argument("--json", action="store_true", help="print JSON")


def _root(options: argparse.Namespace) -> "Store":
    prepare_libraries()
    from rl_core.storage.store import Store

    return Store(options.root or str(home_folder() / "runs"))


def runs(options: argparse.Namespace, console: Console) -> None:
    """Prints the runs, most recently changed first."""
    root = _root(options)
    from tasks.runs.overview import COLUMNS, overview_row, overviews

    found = overviews(root)
    if options.json:
        print(json.dumps([asdict(run) for run in found], indent=1))
    elif found:
        console.columns([COLUMNS, *map(overview_row, found)], f"Runs in {root.url}")
    else:
        console.note(f"no runs in {root.url}; start one with `rollforward run RECIPE`")


def status(options: argparse.Namespace, console: Console) -> None:
    """Prints the status of a run, once or repeatedly."""
    root = _root(options)
    from tasks.runs.overview import current_status, overviews, status_rows
    from tasks.runs.run import stored_run

    name = options.run or next((run.name for run in overviews(root)), None)
    if name is None:
        raise InputError(expected="a run", seen="none", where=root.url, fix="start one with `rollforward run RECIPE`")
    store = stored_run(root, name)
    try:
        while True:
            now = current_status(store)
            if options.json:
                print(json.dumps({"run": store.url, **now.model_dump(), "seconds_left": now.seconds_left}))
            else:
                clear = options.watch and sys.stdout.isatty()
                print("\x1b[H\x1b[J" if clear else "", end="")
                console.table(status_rows(now, time.time()), f"Run {name}")
            if not options.watch or now.state != "running":
                return
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        return


def report(options: argparse.Namespace, console: Console) -> None:
    """Prints the path of the report and opens it if there is a display."""
    root = _root(options)
    from tasks.runs.overview import current_status
    from tasks.runs.report_page import run_page
    from tasks.runs.run import stored_run

    store = stored_run(root, options.run)
    ended = current_status(store).state == "finished" and store.exists(run_files.REPORT)
    file = store.local_path(run_files.REPORT) if ended else None
    if file is None:
        page = store.read_bytes(run_files.REPORT) if ended else run_page(store, {}).encode()
        file = home_folder() / "reports" / f"{Path(store.root).name}.html"
        _write(file, page, f"ROLLFORWARD_HOME={home_folder()}", "set ROLLFORWARD_HOME=FOLDER")
    console.note(f"report: {file}" + ("" if ended else "  (run not finished)"))
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(file.as_uri())


def compare(options: argparse.Namespace, console: Console) -> None:
    """Prints both runs side by side and, with `--html`, writes them as a page."""
    root = _root(options)
    from rl_core.reports.compare import metric_rows, render_comparison, score_rows, setting_rows
    from tasks.runs.compare import side
    from tasks.runs.run import stored_run

    first, second = (side(stored_run(root, run)) for run in options.runs)
    head = ("", first.name, second.name)
    settings = setting_rows(first, second) or [("none", "", "")]
    console.columns([head, *settings], "Settings that differ")
    console.columns([head, *score_rows(first, second)], "Scores")
    console.columns([head, *metric_rows(first, second)], "Metrics, first → last step")
    if options.html:
        page = render_comparison(first, second).encode()
        _write(Path(options.html), page, f"--html {options.html}", "choose another file")
        console.note(f"page: {options.html}")


def _write(file: Path, page: bytes, where: str, fix: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(page)
    except OSError as error:
        raise InputError(expected="a writable file", seen=str(error), where=where, fix=fix) from error
