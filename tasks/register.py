"""Stage: the trained policy as a version of the registered model."""

from rl_core.config.compose import config_hash
from rl_core.storage import step_name
from tasks.registry import CANDIDATE
from tasks.runs import code_version
from tasks.session import current_session
from tasks.stage import stage


@stage("register", "the policy at step {0}")
def register(step: int, data_hash: str, before: dict[str, float], after: dict[str, float]) -> str:
    """Exports the policy, registers it once, and points the alias `candidate` at it; returns the version."""
    session = current_session()
    folder = f"export/{step_name(step)}"
    if session.store.read_manifest(folder) is None:
        trainer = session.trainer
        assert trainer.step == step
        session.roles.actor.export(session.store, folder)
        session.store.commit_folder(folder, {"step": step})
    manifest = session.store.read_manifest(folder)
    assert manifest is not None
    tags = {
        "run": session.run.name,
        "step": str(step),
        "config_hash": config_hash(session.config),
        "data_hash": data_hash,
        "code_version": code_version(),
    }
    metrics = {
        "score_before": before["greedy"],
        "score_after": after["greedy"],
        "sampled_before": before["sampled"],
        "sampled_after": after["sampled"],
    }
    version = session.registry.register(
        session.local_copy(folder), session.tracker.run_id, manifest["sha256"], tags, metrics
    )
    session.registry.set_alias(CANDIDATE, version)
    session.console.note(f"{session.config.registry.model_name} version {version}")
    return version
