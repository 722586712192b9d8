"""Stage: supervised steps on reference answers, so that reinforcement learning starts with nonzero rewards."""

from rl_core.storage import run_files
from rl_core.trainer import warm_start as supervised
from tasks.session.session import Session
from tasks.stage import stage


@stage("warm start")
def warm_start(session: Session) -> None:
    """Commits the folder `warm_start` once."""
    if session.assets.verify_or_remove(run_files.WARM_START):
        return
    total = session.config.warm_start.steps

    def show(step: int, loss: float) -> None:
        if step == 1 or step % max(1, total // 8) == 0:
            session.console.note(f"supervised step {step}/{total}  loss {loss:.3f}")

    roles, assets = session.workers.start(), session.assets
    roles.init_warm_start(str(assets.make_base_model()))
    supervised.warm_start(session.config, assets.train_rows, roles, assets.tokenizer, session.store, assets.chat, show)
