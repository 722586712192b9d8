"""Model versions in MLflow's registry: one version per checkpoint, promoted by aliases, downloaded as HF folders."""

import getpass
import hashlib
import json
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import InputError, TransientError
from rl_core.runtime.guardian import staging
from tasks.prefect_server.events import emit
from tasks.registry.versions import CHECKPOINT, TAG_PREFIX, Move, VersionInfo, version_info
from tasks.tracking.tracker import mlflow_client, mlflow_errors

if TYPE_CHECKING:
    from mlflow import MlflowClient

CANDIDATE, CHAMPION, PREVIOUS = "candidate", "champion", "previous"
WAITING, REFUSED, APPROVED = "waiting", "refused", "approved"
"""Values of the tag `gate` that restrict or record manual promotion; with any other value promotion is free."""
ROLLED_BACK = "rolled back"
"""Reason recorded for the move of a rollback."""
_ATTEMPT = TAG_PREFIX + "attempt"
_MODEL = TAG_PREFIX + "mlflow_model"
_MOVE = TAG_PREFIX + "move."


def model_names(uri: str) -> list[str]:
    """Sorted names of the registered models of the MLflow at `uri`."""
    names: list[str] = []
    token: str | None = None
    with mlflow_errors(uri):
        client = mlflow_client(uri)
        while token is None or token:
            page = client.search_registered_models(page_token=token)
            names += [str(model.name) for model in page]
            token = page.token or ""
    return sorted(names)


def only_model(uri: str) -> str:
    """Name of the only registered model of the MLflow at `uri`; raises `InputError` if there are none or several."""
    names = model_names(uri)
    if len(names) == 1:
        return names[0]
    raise InputError(
        expected="one registered model",
        seen=", ".join(names) or "none",
        where=f"MLflow at {uri}",
        fix=f"add --model {names[0]}" if names else "register one with `rollforward run`",
    )


class Registry:
    """One registered model of the MLflow at `uri`.

    All methods raise `TransientError` on an outage and `InputError` for rejected requests.
    """

    def __init__(self, uri: str, name: str) -> None:
        """The registered model `name` is created by the first registration."""
        self.uri, self.name = uri, name

    @cached_property
    def _client(self) -> "MlflowClient":
        return mlflow_client(self.uri)  # deferred: it reads the file, which may be locked

    def register(
        self, folder: Path, run_id: str, checkpoint_hash: str, tags: Mapping[str, str], metrics: Mapping[str, float]
    ) -> str:
        """Registers the Hugging Face folder, once per checkpoint hash, and returns its version.

        Tags and metrics become tags of the version with the prefix `rollforward.`; metrics are also logged to the
        MLflow run `run_id`, which owns the model. Raises `InputError` if the folder contains no model.
        """
        if not (folder / "config.json").is_file():
            raise InputError(
                expected="a Hugging Face model folder with config.json",
                seen="no config.json" if folder.is_dir() else "no such folder",
                where=str(folder),
                fix="export the checkpoint again by running the same command with --resume",
            )
        version = self.get_or_create(
            checkpoint_hash, lambda tag: self._create(folder, run_id, checkpoint_hash, {**tags, **metrics}, tag)
        )
        with mlflow_errors(self.uri):
            self._log_metrics(run_id, metrics)
        return version

    def get_or_create(self, checkpoint_hash: str, create: Callable[[Mapping[str, str]], None]) -> str:
        """The version of this checkpoint; if there is none, `create` is called with the tags to create it with."""
        with mlflow_errors(self.uri):
            found = self._with_checkpoint(checkpoint_hash)
            if not found:
                attempt = uuid.uuid4().hex
                create({CHECKPOINT: checkpoint_hash, _ATTEMPT: attempt})
                found = self._with_checkpoint(checkpoint_hash)
                # Of several racing processes, all keep the lowest version, and each deletes its own higher one.
                for version in found[1:]:
                    if version.tags.get(_ATTEMPT) == attempt:
                        self._client.delete_model_version(self.name, str(version.version))
        return str(found[0].version)

    def aliases(self) -> dict[str, str]:
        """Version of each alias; empty if the registered model does not exist."""
        with mlflow_errors(self.uri):
            # A search, not a get: for a missing model it returns an empty list, instead of an error that differs
            # between SQLite and a server. In search results models have aliases, versions have none.
            found = self._client.search_registered_models(f"name = '{self.name}'", max_results=1)
        return {alias: str(version) for alias, version in found[0].aliases.items()} if found else {}

    def set_alias(self, alias: str, version: str) -> None:
        """Points the alias at an existing version."""
        with mlflow_errors(self.uri):
            self._client.set_registered_model_alias(self.name, alias, version)

    def set_candidate(self, version: str) -> None:
        """Points the alias `candidate` at the version unless it is at a later one: a reopened run moves nothing."""
        if int(version) > int(self.aliases().get(CANDIDATE, 0)):
            self.set_alias(CANDIDATE, version)

    def versions(self) -> list[VersionInfo]:
        """All versions, newest first."""
        aliases = self.aliases()
        with mlflow_errors(self.uri):
            found = self._search("")
        return [version_info(version, aliases) for version in reversed(found)]

    def get(self, version_or_alias: str) -> VersionInfo:
        """The version with this number or alias; raises `InputError` that lists the existing ones."""
        versions = self.versions()
        for info in versions:
            if version_or_alias == info.version or version_or_alias in info.aliases:
                return info
        existing = ", ".join(" = ".join([f"version {v.version}", *v.aliases]) for v in versions)
        raise InputError(
            expected=f"a version or alias of the registered model {self.name!r}",
            seen=repr(version_or_alias),
            where=f"MLflow at {self.uri}, which has {existing or 'no version of this model'}",
            fix="use one of these" if versions else "register one with `rollforward run` or check registry.model_name",
        )

    def download(self, version_or_alias: str, to: Path) -> Path:
        """Downloads the model's files to the new or empty folder `to` and returns it; completely or not at all."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        version = self.get(version_or_alias).version
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise InputError(
                expected="a new or empty folder",
                seen="files in it" if to.is_dir() else "a file",
                where=str(to),
                fix="choose another folder",
            )
        to.parent.mkdir(parents=True, exist_ok=True)
        with staging(beside=to.parent) as temporary, mlflow_errors(self.uri):
            location = self._client.get_model_version_download_uri(self.name, version)
            target = Path(temporary) / "model"
            target.mkdir()
            get_artifact_repository(location, tracking_uri=self.uri).download_artifacts("", str(target))
            os.replace(target, to)
        return to

    def local_folder(self, version_or_alias: str, cache: Path) -> Path:
        """The model's files in a folder below `cache`, downloaded on first use; must not be modified."""
        info = self.get(version_or_alias)
        # Tags are untrusted: hashed, a tag cannot point outside of the cache.
        key = hashlib.sha256((info.checkpoint or f"{self.uri} {self.name} {info.version}").encode()).hexdigest()
        folder = cache / "versions" / key[:32]
        if not folder.exists():
            try:
                self.download(info.version, folder)
            except (InputError, TransientError):
                if not folder.exists():  # another process was faster
                    raise
        return folder

    def promote(self, version_or_alias: str, why: str = "promoted") -> tuple[str | None, str]:
        """Makes the version champion and its predecessor `previous`; returns both versions (old, new).

        Idempotent. MLflow has no compare-and-set, so of two concurrent promotions the last one wins, and the other
        raises `TransientError` when it reads the alias back; a retry then promotes on top of the winner.
        """
        new, aliases = self.get(version_or_alias).version, self.aliases()
        old = aliases.get(CHAMPION)
        if old != new:
            if old is not None:
                self.set_alias(PREVIOUS, old)
            self._make_champion(new)
        moves = self.moves()
        # False if an earlier attempt ended between alias and record; an unfinished rollback has yet to move the alias.
        recorded = old == new if self._unfinished_rollback(moves, old) else bool(moves) and moves[-1].version == new
        if not recorded:
            move = self._record(new, old if old != new else aliases.get(PREVIOUS), why)
            emit("rollforward.promoted", self.name, asdict(move))
        return old, new

    def rollback(self) -> tuple[str, str]:
        """Swaps the aliases `champion` and `previous`; returns both versions (old champion, new champion).

        Two rollbacks restore the original state; an unfinished rollback is completed. The replaced version gets the
        tag `rolled_back` with the time. Raises `InputError` if there is no previous version.
        """
        aliases = self.aliases()
        old, new = aliases.get(CHAMPION), aliases.get(PREVIOUS)
        if move := self._unfinished_rollback(self.moves(), old):
            old, new = move.before, move.version
        if old is None or new is None or old == new:
            raise InputError(
                expected=f"two versions of {self.name} with the aliases {CHAMPION} and {PREVIOUS}",
                seen=", ".join(f"{alias} is version {version}" for alias, version in sorted(aliases.items())) or "none",
                where=f"MLflow at {self.uri}",
                fix="choose the champion with `rollforward promote VERSION`",
            )
        move = move or self._record(new, old, ROLLED_BACK)  # first, so that a retry finds it
        self.set_alias(PREVIOUS, old)
        self._make_champion(new)
        self.set_tags(old, {"rolled_back": max(_now(), move.at)})  # last: marks completion; clocks may differ
        emit("rollforward.rolled_back", self.name, asdict(move))
        return old, new

    def _unfinished_rollback(self, moves: list[Move], champion: str | None) -> Move | None:
        """The last move, if it is a rollback that was recorded but not completed."""
        if not moves or moves[-1].why != ROLLED_BACK or champion not in (moves[-1].before, moves[-1].version):
            return None
        replaced = next((info for info in self.versions() if info.version == moves[-1].before), None)
        return moves[-1] if replaced and replaced.tags.get("rolled_back", "") < moves[-1].at else None

    def promote_manually(
        self, version_or_alias: str, approve: bool = False, force: bool = False
    ) -> tuple[str | None, str]:
        """Promotes a version manually; returns both versions (old, new).

        `approve` approves a version awaiting approval; `force` overrides a refusal of the gate and is recorded in the
        tag `forced`. Raises `InputError` if the required option is missing, or if nothing awaits the approval.
        """
        info = self.get(version_or_alias)
        verdict = info.tags.get("gate")
        if approve and verdict not in (WAITING, APPROVED):
            raise self._gate_error(info, "a version awaiting approval", f"rollforward promote {info.version}")
        if verdict == WAITING and not approve:
            raise self._gate_error(info, "--approve", f"rollforward promote {info.version} --approve")
        if verdict == REFUSED and not force:
            fix = f"`rollforward lineage {info.version}` shows the reasons; --force promotes it anyway"
            raise self._gate_error(info, "a version not refused by the gate, or --force", fix)
        why = "approved" if approve else "forced against the gate" if verdict == REFUSED else "promoted by hand"
        moved = self.promote(info.version, why)
        if approve and verdict == WAITING:
            self.set_tags(info.version, {"gate": APPROVED, "approved": f"{_now()} by {_user()}"})
        elif verdict == REFUSED:
            self.set_tags(info.version, {"forced": f"{_now()} by {_user()}"})
        return moved

    def set_tags(self, version: str, tags: Mapping[str, str]) -> None:
        """Sets tags of a version, with the prefix `rollforward.`."""
        with mlflow_errors(self.uri):
            for key, value in tags.items():
                self._client.set_model_version_tag(self.name, version, TAG_PREFIX + key, value)

    def moves(self) -> list[Move]:
        """All moves of the alias `champion`, oldest first."""
        with mlflow_errors(self.uri):
            found = self._client.search_registered_models(f"name = '{self.name}'", max_results=1)
        tags = found[0].tags if found else {}
        return [Move(**json.loads(tags[key])) for key in sorted(tags) if key.startswith(_MOVE)]

    def _gate_error(self, info: VersionInfo, expected: str, fix: str) -> InputError:
        seen = f"tag `gate` is {info.tags.get('gate', 'not set')}"
        return InputError(expected, seen, f"version {info.version} of {self.name}", fix)

    def _make_champion(self, version: str) -> None:
        self.set_alias(CHAMPION, version)
        seen = self.aliases().get(CHAMPION)
        if seen != version:
            raise TransientError(f"another process promoted version {seen} of {self.name} at the same time")

    def _record(self, version: str, before: str | None, why: str) -> Move:
        """Records the move in a separate tag: a list in one tag would lose moves of concurrent processes."""
        move = Move(_now(), version, before, why, _user())
        with mlflow_errors(self.uri):
            self._client.set_registered_model_tag(self.name, _MOVE + move.at, json.dumps(asdict(move)))
        return move

    def _search(self, condition: str) -> list[Any]:
        """Versions of the model that also satisfy the condition, lowest first."""
        found: list[Any] = []
        token: str | None = None
        while token is None or token:
            page = self._client.search_model_versions(f"name = '{self.name}'{condition}", page_token=token)
            found.extend(page)
            token = page.token or ""
        # SQLite returns the version as an int, a server as a string.
        return sorted(found, key=lambda version: int(version.version))

    def _with_checkpoint(self, checkpoint_hash: str) -> list[Any]:
        return self._search(f" AND tags.`{CHECKPOINT}` = '{checkpoint_hash}'")

    def _create(
        self, folder: Path, run_id: str, checkpoint_hash: str, facts: Mapping[str, object], tags: Mapping[str, str]
    ) -> None:
        """Uploads the folder and creates a version of it."""
        experiment = self._client.get_run(run_id).info.experiment_id
        all_tags = {**{TAG_PREFIX + key: str(value) for key, value in facts.items()}, **tags}
        model = self._logged_model(experiment, run_id, checkpoint_hash, all_tags)
        self._client.log_model_artifacts(model.model_id, str(folder))
        self._client.finalize_logged_model(model.model_id, "READY")
        # The location, not models:/<id>: SQLite resolves the latter by MLflow's global tracking URI, not the client's.
        self.create_version(model.artifact_location, run_id, {**all_tags, _MODEL: model.model_id})

    def _logged_model(self, experiment: str, run_id: str, checkpoint_hash: str, tags: Mapping[str, str]) -> Any:
        """MLflow's entry for the files, which a failed attempt or a repeated request may already have created."""
        condition = f"tags.`{CHECKPOINT}` = '{checkpoint_hash}' AND source_run_id = '{run_id}'"
        if not (found := self._client.search_logged_models([experiment], condition)):
            self._client.create_logged_model(experiment, source_run_id=run_id, tags=dict(tags))
            found = self._client.search_logged_models([experiment], condition)
        for duplicate in found[1:]:
            self._client.delete_logged_model(duplicate.model_id)
        return found[0]

    def create_version(self, source: str, run_id: str | None, tags: Mapping[str, str]) -> None:
        """Creates a version of files stored in MLflow; `tags` are prefixed and contain the id of the logged model."""
        self._ensure_registered_model()
        # A server accepts a source inside a logged model only with that model's id.
        self._client.create_model_version(self.name, source, run_id, tags=dict(tags), model_id=tags.get(_MODEL))

    def _ensure_registered_model(self) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(self.name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _log_metrics(self, run_id: str, metrics: Mapping[str, float]) -> None:
        """Logs the metrics that the run lacks or has with another value."""
        logged = self._client.get_run(run_id).data.metrics
        for name, value in metrics.items():
            if logged.get(name) != value:
                self._client.log_metric(run_id, name, value)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # `Z`, because tag names must not contain `+`


def _user() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a container's user may have no name
        return f"{os.getuid()}@{socket.gethostname()}"
