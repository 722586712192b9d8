"""Exports the policy as an ordinary Hugging Face folder, which is then evaluated, registered, reloaded and served."""

from dataclasses import asdict
from typing import Any

from rl_core.rollout.weights.canary import Canary
from rl_core.storage import run_files
from tasks.session.session import Session


def export(session: Session, step: int) -> dict[str, Any]:
    """Commits the policy at `step`, the step that training has reached, as a folder, once; returns its manifest."""
    folder = run_files.export(step)
    manifest = session.assets.verify_or_remove(folder)
    if manifest is None:
        actor = session.workers.train_to(step).actor
        files = actor.export(session.store, folder)[0]
        canary: Canary = actor.canary()[0]
        session.store.write_json(run_files.CANARY, asdict(canary))
        manifest = session.store.commit_folder(folder, {"step": step}, files)
    return manifest
