"""Stage: checks and commits the run's training and held-out rows."""

from typing import Any

from rl_core.config.updates import config_warnings
from rl_core.console import Console
from rl_core.data import prepare
from rl_core.data.files import changed_files
from rl_core.data.report import DataReport
from rl_core.data.row_counts import OTHERS
from rl_core.errors import InputError
from rl_core.rewards.row_check import RowCheck
from rl_core.rewards.runner import check_scorers
from rl_core.storage import run_files
from tasks.runs.run import committed_step
from tasks.session.session import Session
from tasks.stage import stage


@stage("prepare data")
def prepare_data(session: Session) -> dict[str, Any]:
    """Commits the rows once and returns their counts and hash.

    Raises InputError if the source files have changed since then, unless the session keeps its rows.
    """
    for text in config_warnings(session.config):
        session.telemetry.warn_once(text)
    session.assets.check_chat_template()
    # Checksums of the content are verified when rows are read.
    committed = session.assets.verify_or_remove(run_files.DATA, content=False)
    if committed and not session.keep_data:
        check_source_files(committed["meta"]["files"], session.config.data.paths, session.run.name)
    session.workers.begin()
    check_row = RowCheck(session.config.reward)
    facts = prepare.prepare_data(
        session.config,
        session.store,
        session.assets.tokenizer,
        session.assets.tools_of,
        lambda count: session.console.note(f"{count:,} rows read"),
        check_row,
        check_row.try_scorers,
    )
    # Rows that an earlier attempt committed may be scored on another machine now.
    counts = {name: f"{rows:,} rows" for name, rows in facts["data_sources"].items() if name != OTHERS}
    check_scorers(session.config.reward, counts)
    session.tracking.trace_with(session.assets.tokenizer)
    session.tracking.flush(committed_step(session.store))  # opens the run in MLflow
    show(prepare.read_report(session.store), session.store.url, session.console)
    return facts


def show(report: DataReport, url: str, console: Console) -> None:
    """Prints the number of rows, the dropped rows and the warnings of the data check."""
    dropped = any(report.dropped(split) for split in ("train", "val"))
    console.note(prepare.summary(report) + (f", listed in {url}/{run_files.DROPPED_ROWS}" if dropped else ""))
    for problem in report.problems:
        console.warning(problem.error)


def check_source_files(recorded: dict[str, str], paths: tuple[str, ...], run: str) -> None:
    """Raises InputError that names each source file that has changed since the run's rows were committed."""
    if paths and (changed := changed_files(recorded, paths)):
        raise InputError(
            expected=f"unchanged source files of the rows of run {run}",
            seen="; ".join(changed),
            where=", ".join(paths),
            fix=f"--run {run} --keep-data continues with the rows stored in the run's folder; "
            "--new starts another run with the new rows",
        )
