"""The policy as an ordinary Hugging Face folder: what is evaluated, registered, loaded again and served."""

from typing import Any

from rl_core.rollout.weights.canary import Canary
from rl_core.storage import run_files
from tasks.session import current_session

"""What the trainer says of fixed tokens with the exported weights."""


def export(step: int) -> dict[str, Any]:
    """Checkpointer the policy at the step that training has reached as a folder, once; returns its manifest."""
    session, folder = current_session(), run_files.export(step)
    manifest = session.verified_manifest(folder)
    if manifest is None:
        session.trained_to(step)
        files = session.roles.actor.export(session.store, folder)[0]
        canary: Canary = session.roles.actor.canary()[0]
        session.store.write_json(run_files.CANARY, {"token_ids": canary.token_ids, "log_probs": canary.log_probs})
        manifest = session.store.commit_folder(folder, {"step": step}, files)
    return manifest
