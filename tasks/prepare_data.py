"""Stage: the run's training and held-out rows, checked and committed."""

from typing import Any

from rl_core.console import Console
from rl_core.data import prepare
from rl_core.data.files import changed_files
from rl_core.data.report import DataReport
from rl_core.errors import InputError
from rl_core.rewards.runner import check_scorers
from rl_core.storage import run_files
from tasks.runs.run import committed_step
from tasks.session.session import Session
from tasks.stage import stage


@stage("prepare data")
def prepare_data(session: Session) -> dict[str, Any]:
    """Commits the rows once; returns their counts and hash.

    Raises InputError when the files that they were made of have changed since, unless the session keeps its rows.
    """
    session.assets.check_chat_template()
    committed = session.assets.verify_or_remove(
        run_files.DATA, content=False
    )  # what rows say is checked as they are read
    if committed and not session.keep_data:
        check_unchanged(committed["meta"]["files"], session.config.data.paths, session.run.name)
    facts = prepare.prepare_data(
        session.config,
        session.store,
        session.assets.tokenizer,
        session.assets.tools_of,
        lambda count: session.console.note(f"{count:,} rows so far"),
    )
    check_scorers(session.config.reward, {name: f"{rows:,} rows" for name, rows in facts["data_sources"].items()})
    session.tracking.trace_with(session.assets.tokenizer)
    session.tracking.flush(committed_step(session.store))  # opens the run in MLflow
    show(prepare.read_report(session.store), session.store.url, session.console)
    return facts


def show(report: DataReport, url: str, console: Console) -> None:
    """Tells how many rows there are, what was dropped and what a person may want to know of them."""
    dropped = any(report.dropped(split) for split in ("train", "val"))
    console.note(prepare.summary(report) + (f", listed in {url}/{run_files.DROPPED_ROWS}" if dropped else ""))
    for problem in report.problems:
        console.warning(problem.error)


def check_unchanged(recorded: dict[str, str], paths: tuple[str, ...], run: str) -> None:
    """Raises InputError naming each file that is not as it was when the run's rows were made of it."""
    if paths and (changed := changed_files(recorded, paths)):
        raise InputError(
            f"the files that the rows of run {run} were made of",
            "; ".join(changed),
            ", ".join(paths),
            f"--run {run} --keep-data continues on the rows that the run began with, which are in its folder; "
            "--new begins another run with the new ones",
        )
