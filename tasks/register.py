"""Stage: registers the trained policy, with its model card, as a version of the model."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from prefect.runtime import flow_run

from rl_core.config.compose import config_hash, flatten
from rl_core.reports.model_card import CARD, folder_hash, render_card, weights_hash
from rl_core.storage import run_files
from rl_core.storage.manifest import Json
from tasks.export import export
from tasks.registry.lineage import ALSO_PREFIX, versions_with_tag
from tasks.runs.run import code_version, package_versions, sampled_records
from tasks.session.session import Session
from tasks.stage import stage

LINEAGE = {
    "run": "run", "run folder": "store", "config hash": "config_hash", "code": "code_version",
    "MLflow run": "mlflow_run",
}  # fmt: skip
"""Titles of the model card's lineage rows, and the tags of the version that they show."""


@stage("register", "policy at step {0}")
def register(session: Session, step: int, data_hash: str, before: dict[str, float], after: dict[str, float]) -> str:
    """Exports the policy, registers it once, points the alias `candidate` at it, and returns the version."""
    session.tracking.send(step)  # metrics and traces that an outage has delayed
    manifest, tags = export(session, step), _tags(session, step, data_hash)
    evaluations = [session.store.read_json(run_files.evaluation(each)) for each in (0, step)]
    manifest = _with_card(session, manifest, tags, *evaluations)
    metrics = {
        "score_before": before["greedy"],
        "score_after": after["greedy"],
        "sampled_before": before["sampled"],
        "sampled_after": after["sampled"],
    }
    if interval := evaluations[1].get("intervals", {}).get("greedy"):
        metrics |= {"score_low": interval[0], "score_high": interval[1]}
    folder = session.assets.download(run_files.export(step))
    version = session.registry.register(folder, session.tracking.tracker.run_id, weights_hash(manifest), tags, metrics)
    session.registry.set_candidate(version)
    text, first_run = f"{session.registry.name} version {version}", session.registry.get(version).run
    if first_run != session.run.name:
        session.registry.set_tags(version, {ALSO_PREFIX + session.run.name: str(step)})
        same = f"the weights are those of {session.registry.name} version {version}, registered by run {first_run}"
        session.telemetry.warn_once(f"{same}: this run makes no new version")
    session.console.note(text)
    return version


def _tags(session: Session, step: int, data_hash: str) -> dict[str, str]:
    parent_hash = folder_hash(session.assets.make_base_model())
    # A base model that is a version of this MLflow is recognised by its weights, whatever folder it was loaded from.
    versions = versions_with_tag(session.tracking.uri, "checkpoint", parent_hash)
    own = [name for name in versions if name.startswith(f"models:/{session.registry.name}/")]
    return {
        "run": session.run.name,
        "step": str(step),
        "recipe": session.run.composed.recipe,
        "config_hash": config_hash(session.config),
        "data_hash": data_hash,
        "code_version": code_version(),
        "parent": [*own, *versions, session.config.model.path][0],
        "parent_hash": parent_hash,
        "flow_run": str(flow_run.id),
        "mlflow_run": session.tracking.tracker.run_id,
        "packages": json.dumps(package_versions()),
        "store": session.run.url,
    }


def _with_card(
    session: Session, manifest: Json, tags: Mapping[str, str], before: Mapping[str, Any], after: Mapping[str, Any]
) -> Json:
    """Adds the model card to the export and commits it again, unless the same card is already committed."""
    config, origins, folder = session.config, session.run.composed.origins, run_files.export(int(tags["step"]))
    facts = {
        "name": config.registry.model_name,
        "base": "A small offline model" if tags["parent"] == "tiny" else tags["parent"],
        "step": int(tags["step"]),
        "recipe": tags["recipe"],
        "settings": {key: value for key, value in flatten(config).items() if origins.get(key, "default") != "default"},
        "lineage": {
            "weights": weights_hash(manifest),
            "trained from": f"{tags['parent']}, weights {tags['parent_hash']}",
            **{title: tags[key] for title, key in LINEAGE.items()},
            "packages": ", ".join(f"{name} {version}" for name, version in package_versions().items()),
        },
        "prompt_length": config.data.max_prompt_length,
        "response_length": config.data.max_response_length,
        "seed": config.trainer.seed,
        "programs": config.reward.code.risk,
    }
    rows = session.store.read_manifest(run_files.DATA)
    assert rows is not None
    card = render_card(facts, before, after, rows["meta"], sampled_records(session.store)).encode()
    committed = {file["path"]: file["sha256"] for file in manifest["files"]}
    if committed.get(CARD) == hashlib.sha256(card).hexdigest():
        return manifest
    files = [file for file in manifest["files"] if file["path"] != CARD]
    files.append(session.store.add_bytes(card, folder, CARD))
    return session.store.commit_folder(folder, manifest["meta"], files)
