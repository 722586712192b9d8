"""Stage: the run's training and held-out rows, checked and committed."""

from typing import Any

from rl_core.data import prepare
from rl_core.rewards.runner import check_scorers
from tasks.session import current_session
from tasks.stage import stage


@stage("prepare data")
def prepare_data() -> dict[str, Any]:
    """Commits the rows once; returns their counts and hash."""
    session = current_session()
    assert session.chat  # a template that cannot take tools or environment is refused before anything is made
    facts = prepare.prepare_data(session.config, session.store, session.tokenizer, session.tools_of)
    check_scorers(session.config.reward, session.train_rows.rows + session.val_rows.rows)
    session.tracker.set_tags({"rollforward.data_hash": facts["data_hash"]})
    session.console.note(f"{facts['train_rows']} training rows, {facts['val_rows']} held out")
    return facts
