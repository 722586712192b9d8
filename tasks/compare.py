"""What a comparison needs of a run, from its store."""

from rl_core.compare import Side
from rl_core.config.compose import from_dict
from rl_core.ledger import Ledger
from rl_core.storage import Store
from tasks.pages import scores
from tasks.runs import RUN_FILE, committed_step


def side(store: Store) -> Side:
    """The run as far as it is committed."""
    run = store.read_json(RUN_FILE)
    last = {name: before if after is None else after for name, (before, after) in scores(store).items()}
    return Side(
        run["name"],
        from_dict(run["config"]),
        {name: score for name, score in last.items() if score is not None},
        Ledger(store).records(committed_step(store)),
    )
