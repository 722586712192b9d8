"""Stage: supervised steps on reference answers, so that reinforcement finds rewards to learn from."""

from rl_core.storage import run_files
from rl_core.trainer import warm_start as supervised
from tasks.session import current_session
from tasks.stage import stage


@stage("warm start")
def warm_start() -> None:
    """Checkpointer the folder `warm_start` once."""
    session = current_session()
    if session.verified_manifest(run_files.WARM_START):
        return
    total = session.config.warm_start.steps

    def show(step: int, loss: float) -> None:
        if step == 1 or step % max(1, total // 8) == 0:
            session.console.note(f"supervised step {step}/{total}  loss {loss:.3f}")

    session.roles.init_warm_start(str(session.base_model))
    supervised.warm_start(
        session.config, session.train_rows, session.roles, session.tokenizer, session.store, session.chat, show
    )
