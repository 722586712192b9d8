"""Model versions in MLflow's registry: one version a checkpoint, moved by aliases, downloaded as a plain HF folder."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rl_core.errors import InputError
from tasks.tracking import mlflow_client, mlflow_errors

CANDIDATE, CHAMPION, PREVIOUS = "candidate", "champion", "previous"
TAG_PREFIX = "rollforward."
_CHECKPOINT = TAG_PREFIX + "checkpoint"


@dataclass(frozen=True)
class VersionInfo:
    """A registered version with what its tags say; a field whose tag is missing is None."""

    version: str
    aliases: tuple[str, ...]
    step: int | None
    run: str | None
    score_before: float | None
    score_after: float | None
    created: datetime
    checkpoint: str | None


def decide(candidate: VersionInfo, champion: VersionInfo | None, min_score: float) -> tuple[bool, str]:
    """Whether the candidate becomes champion, and why in words: good enough and not below the present champion."""
    score = candidate.score_after
    if score is None:
        return False, f"version {candidate.version} has no score"
    if score < min_score:
        return False, f"score {score:.3f} is below registry.min_score {min_score:.3f}"
    if champion is None:
        return True, f"score {score:.3f} and there is no champion yet"
    if champion.version == candidate.version:
        return True, f"version {candidate.version} is the champion already"
    if champion.score_after is None:
        return True, f"score {score:.3f} and the champion, version {champion.version}, has no score"
    words = f"score {score:.3f} against {champion.score_after:.3f} of the champion, version {champion.version}"
    return score >= champion.score_after, words


def only_model(uri: str) -> str:
    """Name of the one registered model of the MLflow at `uri`; raises `InputError` when there are none or several."""
    with mlflow_errors(uri):
        names = sorted(model.name for model in mlflow_client(uri).search_registered_models())
    if len(names) == 1:
        return str(names[0])
    raise InputError(
        expected="one registered model",
        seen=", ".join(names) or "none",
        where=f"MLflow at {uri}",
        fix=f"add --model {names[0]}" if names else "register one with `rollforward run`",
    )


class Registry:
    """One registered model of the MLflow at `uri`.

    All methods raise `TransientError` on an outage and `InputError` for what MLflow refuses.
    """

    def __init__(self, uri: str, name: str) -> None:
        """Open the registered model `name`, which is made by the first registration."""
        self.uri, self.name = uri, name
        self._client = mlflow_client(uri)

    def register(
        self, folder: Path, run_id: str, checkpoint_hash: str, tags: Mapping[str, str], metrics: Mapping[str, float]
    ) -> str:
        """Register the Hugging Face folder and return its version; the same checkpoint hash gives one version only.

        Tags and metrics become tags of the version with the prefix `rollforward.`; metrics are also logged to the
        MLflow run `run_id`, which the model belongs to. Raises `InputError` when the folder holds no model.
        """
        if not (folder / "config.json").is_file():
            raise InputError(
                expected="a Hugging Face model folder with config.json",
                seen="no config.json" if folder.is_dir() else "no such folder",
                where=str(folder),
                fix="export the checkpoint again by running the same command with --resume",
            )
        with mlflow_errors(self.uri):
            found = self._with_checkpoint(checkpoint_hash)
            if not found:
                own = self._create(folder, run_id, checkpoint_hash, {**tags, **metrics})
                found = self._with_checkpoint(checkpoint_hash)
                # Of processes that raced here all keep the lowest version, and each removes what it added above it.
                for version in found[1:]:
                    if version.source == own:
                        self._client.delete_model_version(self.name, str(version.version))
            self._log_metrics(run_id, metrics)
        return str(found[0].version)

    def aliases(self) -> dict[str, str]:
        """Version of each alias; empty when the registered model does not exist."""
        with mlflow_errors(self.uri):
            # Searching instead of getting: a missing model is an empty answer, not an error that looks different
            # from SQLite and from a server. Versions have no aliases in search results, models do.
            found = self._client.search_registered_models(f"name = '{self.name}'", max_results=1)
        return {alias: str(version) for alias, version in found[0].aliases.items()} if found else {}

    def set_alias(self, alias: str, version: str) -> None:
        """Point the alias at an existing version."""
        with mlflow_errors(self.uri):
            self._client.set_registered_model_alias(self.name, alias, version)

    def versions(self) -> list[VersionInfo]:
        """All versions, newest first."""
        aliases = self.aliases()
        with mlflow_errors(self.uri):
            found = self._search("")
        return [_info(version, aliases) for version in reversed(found)]

    def get(self, version_or_alias: str) -> VersionInfo:
        """The version with this number or alias; raises `InputError` that lists what there is."""
        versions = self.versions()
        for info in versions:
            if version_or_alias == info.version or version_or_alias in info.aliases:
                return info
        there = ", ".join(" = ".join([f"version {v.version}", *v.aliases]) for v in versions)
        raise InputError(
            expected=f"a version or alias of the registered model {self.name!r}",
            seen=repr(version_or_alias),
            where=f"MLflow at {self.uri}, which has {there or 'no version of this model'}",
            fix="name one of these" if versions else "register one with `rollforward run` or check registry.model_name",
        )

    def download(self, version_or_alias: str, to: Path) -> Path:
        """Copy the model's files to the folder `to`, which must be new or empty, and return it; whole or not at all."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        version = self.get(version_or_alias).version
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise InputError(
                expected="a folder that is new or empty",
                seen="something is there already",
                where=str(to),
                fix="name another folder",
            )
        to.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=to.parent) as temporary, mlflow_errors(self.uri):
            location = self._client.get_model_version_download_uri(self.name, version)
            target = Path(temporary) / "model"
            target.mkdir()
            get_artifact_repository(location, tracking_uri=self.uri).download_artifacts("", str(target))
            os.replace(target, to)
        return to

    def promote(self, version_or_alias: str) -> tuple[str | None, str]:
        """Make the version champion and its forerunner `previous`; returns both versions (old, new)."""
        new = self.get(version_or_alias).version
        old = self.aliases().get(CHAMPION)
        if old != new:
            if old is not None:
                self.set_alias(PREVIOUS, old)
            self.set_alias(CHAMPION, new)
        return old, new

    def _search(self, condition: str) -> list[Any]:
        """Versions that fulfil the condition too, lowest first."""
        found: list[Any] = []
        token: str | None = None
        while token is None or token:
            page = self._client.search_model_versions(f"name = '{self.name}'{condition}", page_token=token)
            found.extend(page)
            token = page.token or ""
        # The version is an int from SQLite and a string from a server.
        return sorted(found, key=lambda version: int(version.version))

    def _with_checkpoint(self, checkpoint_hash: str) -> list[Any]:
        return self._search(f" AND tags.`{_CHECKPOINT}` = '{checkpoint_hash}'")

    def _create(self, folder: Path, run_id: str, checkpoint_hash: str, tags: Mapping[str, object]) -> str:
        """Upload the folder and make a version of it; returns the version's source, which no other version has."""
        experiment = self._client.get_run(run_id).info.experiment_id
        all_tags = {_CHECKPOINT: checkpoint_hash, **{TAG_PREFIX + key: str(value) for key, value in tags.items()}}
        model = self._client.create_logged_model(experiment, source_run_id=run_id, tags=all_tags)
        self._client.log_model_artifacts(model.model_id, str(folder))
        self._client.finalize_logged_model(model.model_id, "READY")
        self._ensure_registered_model()
        # The location itself, not models:/<id>: SQLite resolves that by MLflow's global tracking URI, not the client's.
        self._client.create_model_version(
            self.name, model.artifact_location, run_id, tags=all_tags, model_id=model.model_id
        )
        return str(model.artifact_location)

    def _ensure_registered_model(self) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(self.name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _log_metrics(self, run_id: str, metrics: Mapping[str, float]) -> None:
        """Log the metrics that the run does not have with this value."""
        there = self._client.get_run(run_id).data.metrics
        for name, value in metrics.items():
            if there.get(name) != value:
                self._client.log_metric(run_id, name, value)


def _info(version: Any, aliases: Mapping[str, str]) -> VersionInfo:
    number = str(version.version)

    def tag(key: str) -> str | None:
        return version.tags.get(TAG_PREFIX + key)

    def score(key: str) -> float | None:
        text = tag(key)
        return None if text is None else float(text)

    step = tag("step")
    return VersionInfo(
        version=number,
        aliases=tuple(sorted(alias for alias, target in aliases.items() if target == number)),
        step=None if step is None else int(step),
        run=tag("run"),
        score_before=score("score_before"),
        score_after=score("score_after"),
        created=datetime.fromtimestamp(version.creation_timestamp / 1000, tz=UTC),
        checkpoint=tag("checkpoint"),
    )
