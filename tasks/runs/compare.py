"""Reads one side of a comparison of two runs from its store."""

from rl_core.config.compose import from_dict
from rl_core.reports.compare import Side
from rl_core.storage import run_files
from rl_core.storage.store import Store
from tasks.runs.report_page import scores
from tasks.runs.run import committed_step, sampled_records


def side(store: Store) -> Side:
    """Config, last scores, committed steps and a sample of the ledger records of a run."""
    run = store.read_json(run_files.RUN)
    last = {name: before if after is None else after for name, (before, after) in scores(store).items()}
    return Side(
        run["name"],
        from_dict(run["config"]),
        {name: score for name, score in last.items() if score is not None},
        committed_step(store),
        sampled_records(store),
    )
