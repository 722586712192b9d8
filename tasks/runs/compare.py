"""Reads one side of a comparison of two runs from its store."""

from rl_core.config.compose import from_dict
from rl_core.reports.compare import Side
from rl_core.storage import run_files
from rl_core.storage.ledger import Ledger
from rl_core.storage.store import Store
from tasks.runs.report_page import scores
from tasks.runs.run import committed_step


def side(store: Store) -> Side:
    """Config, last scores and committed ledger records of a run."""
    run = store.read_json(run_files.RUN)
    last = {name: before if after is None else after for name, (before, after) in scores(store).items()}
    return Side(
        run["name"],
        from_dict(run["config"]),
        {name: score for name, score in last.items() if score is not None},
        Ledger(store).records(committed_step(store)),
    )
