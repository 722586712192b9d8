"""Copies a version to another registered model, in the same MLflow or in another one."""

from pathlib import Path

from rl_core.credentials import without_credentials
from rl_core.errors import InputError
from tasks.registry.registry import Registry
from tasks.registry.versions import TAG_PREFIX
from tasks.tracking.tracker import Tracker, mlflow_client, mlflow_errors


def copy_version(source: Registry, version_or_alias: str, name: str, uri: str | None, cache: Path) -> str:
    """Copies a version to the registered model `name`, once per checkpoint, and returns its version number there.

    Within one MLflow only the entry is copied; to another one, at `uri`, the files are copied through the folder
    `cache`. Tags are copied, aliases are not; the tags `copied_from` and `copied_from_uri` name the original. Raises
    `InputError` if source and target are the same, or if the version has no checkpoint tag.
    """
    info, target = source.get(version_or_alias), Registry(uri or source.uri, name)
    if info.checkpoint is None:
        raise InputError(
            expected="a version registered by Rollforward",
            seen="no tag rollforward.checkpoint",
            where=f"version {info.version} of {source.name}",
            fix="copy it with MLflow's copy_model_version",
        )
    if (target.uri, target.name) == (source.uri, source.name):
        raise InputError(
            expected="another registered model",
            seen=f"{name} itself",
            where="--to",
            fix="choose another name, or another MLflow with --to-uri",
        )
    came_from = f"models:/{source.name}/{info.version}"
    origin = {"copied_from": came_from, "copied_from_uri": without_credentials(source.uri)}
    if target.uri != source.uri:
        folder = source.local_folder(info.version, cache)
        run_id = _run_of_copies(target.uri, info.checkpoint)
        return target.register(folder, run_id, info.checkpoint, {**info.tags, **origin}, {})
    with mlflow_errors(source.uri):
        version = mlflow_client(source.uri).get_model_version(source.name, info.version)
    assert version.source
    files, tags = version.source, version.tags | {TAG_PREFIX + key: value for key, value in origin.items()}
    return target.get_or_create(
        info.checkpoint, lambda own: target.create_version(files, version.run_id, {**tags, **own})
    )


def _run_of_copies(uri: str, checkpoint: str) -> str:
    """Id of the MLflow run that owns the files of a copy: MLflow requires one for logged files."""
    database = uri.removeprefix("sqlite:///")
    root = None if database == uri else Path(database).parent / "mlartifacts"
    tracker = Tracker(uri, "rollforward", f"copy-{checkpoint[:16]}", checkpoint, root)
    run_id = tracker.run_id
    tracker.end("FINISHED")
    return run_id
