"""Copies of a version: under a production name, or in the MLflow of another place."""

from pathlib import Path

from rl_core.credentials import without_credentials
from rl_core.errors import InputError
from tasks.registry.registry import Registry
from tasks.registry.versions import TAG_PREFIX
from tasks.tracking.tracker import Tracker, mlflow_client, mlflow_errors


def copy_version(source: Registry, version_or_alias: str, name: str, uri: str | None, cache: Path) -> str:
    """Copy a version to the registered model `name` and return its number there; the same checkpoint gives one only.

    Within one MLflow nothing but the entry is copied. To another, at `uri`, the files go by way of the folder `cache`.
    Tags go along, aliases do not; `copied_from` and `copied_from_uri` say where it was. Raises `InputError` when source
    and target are the same, or the version says of no checkpoint.
    """
    info, target = source.get(version_or_alias), Registry(uri or source.uri, name)
    if info.checkpoint is None:
        raise InputError(
            expected="a version that Rollforward has registered",
            seen="no tag rollforward.checkpoint",
            where=f"version {info.version} of {source.name}",
            fix="copy it with MLflow's own copy_model_version",
        )
    if (target.uri, target.name) == (source.uri, source.name):
        raise InputError(
            "another registered model", f"{name} itself", "--to", "give another name, or another MLflow with --to-uri"
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
    return target.once(info.checkpoint, lambda own: target.create_version(files, version.run_id, {**tags, **own}))


def _run_of_copies(uri: str, checkpoint: str) -> str:
    """Id of an MLflow run that files of a copy belong to: each folder of files belongs to a run there."""
    database = uri.removeprefix("sqlite:///")
    root = None if database == uri else Path(database).parent / "mlartifacts"
    tracker = Tracker(uri, "rollforward", f"copy-{checkpoint[:16]}", checkpoint, root)
    run_id = tracker.run_id
    tracker.end("FINISHED")
    return run_id
