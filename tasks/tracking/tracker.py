"""Metrics of a run in MLflow: every ledger record is logged once, across crashes, and no outage stops training.

MLflow is imported inside functions so that `configure_mlflow` can set its environment first.
"""

import hashlib
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_core.credentials import CREDENTIALS_FIX, holds_credentials
from rl_core.errors import InputError, RollforwardError, TransientError
from tasks.tracking.login import register_login
from tasks.tracking.outage import LOCKED, OutageGuard, server_problem, short_timeouts, sqlite_problem

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

STEP_METRIC = "rollforward/step"
RUN_TAG = "rollforward.run"
KEY_TAG = "rollforward.key"
CONFIG_TAG = "rollforward.config_hash"
_ATTEMPT_TAG = "rollforward.attempt"

_METRICS_PER_BATCH = 1000
_PARAMS_PER_BATCH = 100
_PARAM_LENGTH = 6000
_NAME_LENGTH = 250
_CALLER_MISTAKES = {
    "INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE", "BAD_REQUEST",
    "PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED",
}  # fmt: skip
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}


def configure_mlflow() -> None:
    """Sets MLflow's environment (no telemetry, short retries, no progress bars) except for variables already set.

    Must be called before MLflow is imported.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def local_tracking_uri(home: Path) -> str:
    """URI of the SQLite file in the home folder."""
    return f"sqlite:///{home.absolute()}/mlflow.db"


def default_tracking_uri(home: Path) -> str:
    """The tracking URI of runs whose config has none: MLFLOW_TRACKING_URI, or the SQLite file in the home folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or local_tracking_uri(home)


def check_tracking(uri: str, resuming: bool = False) -> None:
    """Checks within seconds that runs can be tracked at `uri`.

    Raises `InputError` if no MLflow server answers, the SQLite file cannot be written, or `uri` is neither. With
    `resuming` a server need not answer: its address was valid before, and the ledger stores the records meanwhile.
    A file locked by another process is accepted.
    """
    if holds_credentials(uri):
        raise InputError(
            expected="the address of an MLflow server without credentials",
            seen="an address with credentials",
            where="tracking.uri",
            fix=CREDENTIALS_FIX,
        )
    if uri.startswith(("http://", "https://")):
        if not resuming and (problem := server_problem(uri)):
            raise InputError(
                expected=f"an MLflow server at {uri}",
                seen=problem,
                where="tracking.uri",
                fix="start it with `mlflow server --host … --port …`, or unset tracking.uri to use a local file",
            )
    elif uri.startswith("sqlite:///"):
        if (problem := sqlite_problem(Path(uri.removeprefix("sqlite:///")))) and LOCKED not in problem:
            raise InputError(
                expected="a writable SQLite file",
                seen=problem,
                where=f"tracking.uri = {uri}",
                fix="make the folder writable, or use another one with tracking.uri=sqlite:////absolute/path/mlflow.db",
            )
    else:
        raise InputError(
            expected="http://…, https://… or sqlite:////absolute/path/mlflow.db",
            seen=repr(uri),
            where="tracking.uri",
            fix="use one of these forms, or unset tracking.uri to use a local file",
        )


def mlflow_client(uri: str) -> "MlflowClient":
    """A client with tracking server and registry at `uri`, independent of MLflow's global settings."""
    from mlflow import MlflowClient

    register_login()
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


@contextmanager
def mlflow_errors(uri: str) -> Iterator[None]:
    """Converts MLflow's exceptions to `InputError` (rejected requests) or `TransientError` (everything else)."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except MlflowException as error:
        # An IntegrityError comes from two processes writing the same row at once.
        if error.error_code in _CALLER_MISTAKES and "IntegrityError" not in error.message:
            raise InputError(
                expected="a request that MLflow accepts",
                seen=error.message,
                where=f"MLflow at {uri}",
                fix="change the name or setting in the message, or the credentials "
                "(MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD)",
            ) from error
        raise TransientError(f"MLflow at {uri} failed: {error.message}") from error
    except NotImplementedError as error:
        raise InputError(
            expected="an MLflow server that supports the request",
            seen=str(error),
            where=f"MLflow at {uri}",
            fix="update the server to the version of MLflow installed here",
        ) from error
    except SQLAlchemyError as error:
        raise TransientError(f"MLflow at {uri} failed: {error}") from error
    except OSError as error:
        raise TransientError(f"MLflow at {uri} or its artifact store failed: {error}") from error


Records = Callable[[int], Iterable[Mapping[str, Any]]]
"""Returns the records after a step, in order."""


class Tracker:
    """The MLflow run of a Rollforward run, found by its name and key or created on first use.

    It is opened by the first call, so a tracker can be constructed while the server is down. `flush` and `end` never
    raise; the other methods raise `TransientError` on an outage and `InputError` for rejected requests.
    """

    def __init__(
        self,
        uri: str,
        experiment: str,
        run_name: str,
        run_key: str,
        artifact_root: Path | None,
        on_open: Callable[["Tracker"], None] = lambda tracker: None,
    ) -> None:
        """Artifacts of a new experiment are stored below `artifact_root`; with None, where the server decides.

        `on_open` logs the run's initial data; if it fails, the next call opens the run again.
        """
        self.uri, self.experiment, self.run_name, self.run_key = uri, experiment, run_name, run_key
        self._artifact_root, self._on_open = artifact_root, on_open
        self._run_id: str | None = None
        self._last_step: int | None = None
        self._outage = OutageGuard(uri, "Metrics")

    @cached_property
    def _client(self) -> "MlflowClient":
        return mlflow_client(self.uri)  # deferred: it reads the file, which may be locked

    @property
    def run_id(self) -> str:
        """Id of the MLflow run, which is opened (status RUNNING) on first use."""
        if self._run_id is None:
            with mlflow_errors(self.uri):
                self._run_id = run_id = self._open()
            try:
                self._on_open(self)
            except BaseException:
                self._run_id = None
                raise
            return run_id
        return self._run_id

    def log_config(self, flat: Mapping[str, object], yaml_text: str, config_hash: str) -> None:
        """Logs the missing parameters, the whole config as `config.yaml`, and its hash as a tag."""
        from mlflow.entities import Param

        run_id = self.run_id
        with mlflow_errors(self.uri):
            logged = self._client.get_run(run_id).data.params
            new = [Param(key, str(value)[:_PARAM_LENGTH]) for key, value in flat.items() if key not in logged]
            for start in range(0, len(new), _PARAMS_PER_BATCH):
                self._client.log_batch(run_id, params=new[start : start + _PARAMS_PER_BATCH])
            self._client.log_text(run_id, yaml_text, "config.yaml")
            self._client.set_tag(run_id, CONFIG_TAG, config_hash)

    def flush(self, records: Records) -> int:
        """As `send`, with short timeouts; an outage is logged and 0 is returned."""
        with self._outage.tolerate():
            self._outage.probe()
            return self.send(records)
        self._last_step = None  # after an outage, read again what MLflow has
        return 0

    def send(self, records: Records) -> int:
        """Sends the records that MLflow lacks and returns their number.

        A record is {"step": int, "time": seconds since 1970, "metrics": {name: number}}; `records` returns those of
        the run after a step. Records delayed by an outage are therefore sent by the first call that succeeds.
        """
        sent = 0
        try:
            run_id = self.run_id
            for batch, count, step in _batches(records(self._last_logged_step())):
                with mlflow_errors(self.uri):
                    self._client.log_batch(run_id, metrics=batch)
                self._last_step = step
                sent += count
        except BaseException:
            # A failed call may still have reached MLflow: read its last step again before the next one.
            self._last_step = None
            raise
        return sent

    def log_file(self, content: Path | str, name: str) -> None:
        """Logs a file (a path) or a text (a string) as the artifact `name`."""
        text = content.read_text(encoding="utf-8") if isinstance(content, Path) else content
        run_id = self.run_id
        with mlflow_errors(self.uri):
            self._client.log_text(run_id, text, name)

    @property
    def page(self) -> str:
        """URL of the run's page on a server."""
        run_id = self.run_id
        with mlflow_errors(self.uri):
            experiment_id = self._client.get_run(run_id).info.experiment_id
        return f"{self.uri.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"

    def set_description(self, markdown: str) -> None:
        """Sets the description at the top of the run's page."""
        self.set_tags({"mlflow.note.content": markdown})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Sets tags of the run."""
        from mlflow.entities import RunTag

        run_id = self.run_id
        with mlflow_errors(self.uri):
            self._client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def end(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """Closes the run; an outage is logged, not raised, so that it cannot hide the run's own error."""
        try:
            with short_timeouts():
                self._outage.probe()
                run_id = self.run_id
                with mlflow_errors(self.uri):
                    self._client.set_terminated(run_id, status=status)
        except RollforwardError as error:
            logger.warning("The MLflow run stays open. %s", error)

    def _open(self) -> str:
        if not (found := self._found()):
            tags = {RUN_TAG: self.run_name, KEY_TAG: self.run_key, _ATTEMPT_TAG: uuid.uuid4().hex}
            self._client.create_run(self._experiment_id(), run_name=self.run_name, tags=tags)
            found = self._found()
        first, *others = found
        for run in others:
            # MLflow's client repeats a request whose answer was lost; the server may have executed both.
            if run.data.tags.get(_ATTEMPT_TAG) == first.data.tags.get(_ATTEMPT_TAG, ""):
                self._client.delete_run(run.info.run_id)
        run_id = str(first.info.run_id)
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _found(self) -> list[Any]:
        """MLflow's runs of this run, oldest first: one, unless a repeated request created more."""
        own = f"tags.`{RUN_TAG}` = '{self.run_name}' and tags.`{KEY_TAG}` = '{self.run_key}'"
        found = self._client.search_runs([self._experiment_id()], own)
        return sorted(found, key=lambda run: (run.info.start_time, run.info.run_id))

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self.experiment)
        if found is None:
            # MLflow's default is a folder below the working directory.
            location = self._artifact_root.absolute().as_uri() if self._artifact_root else None
            try:
                return str(self._client.create_experiment(self.experiment, artifact_location=location))
            except MlflowException as error:
                # Created by another process at the same time, or by an earlier request whose answer was lost.
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self._client.get_experiment_by_name(self.experiment)
                assert found is not None
        if found.lifecycle_stage == "deleted":
            raise InputError(
                expected="an active MLflow experiment",
                seen=f"experiment {self.experiment!r} is deleted",
                where=f"MLflow at {self.uri}",
                fix=f"run `mlflow experiments restore -x {found.experiment_id}`, or set another tracking.experiment",
            )
        return str(found.experiment_id)

    def _last_logged_step(self) -> int:
        """Step of the newest record in MLflow, -1 without any; read once, then cached."""
        if self._last_step is None:
            with mlflow_errors(self.uri):
                latest = self._client.get_run(self.run_id).data.metrics  # of each metric the value at the highest step
            self._last_step = int(latest.get(STEP_METRIC, -1))
        return self._last_step


def _batches(records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[list[Any], int, int]]:
    """Packs whole records into calls: (metrics, number of records, last step). MLflow stores a call completely or not
    at all."""
    batch: list[Any] = []
    count, last = 0, -1
    for record in records:
        metrics = _metrics(record)
        if batch and len(batch) + len(metrics) > _METRICS_PER_BATCH:
            yield batch, count, last
            batch, count = [], 0
        batch, count, last = batch + metrics, count + 1, record["step"]
    if batch:
        yield batch, count, last


def _metrics(record: Mapping[str, Any]) -> list[Any]:
    """The metrics of a record plus `STEP_METRIC`; names that MLflow forbids are changed."""
    from mlflow.entities import Metric

    values = {**record["metrics"], STEP_METRIC: record["step"]}
    time_ms = int(record["time"] * 1000)
    return [Metric(_name(name), float(value), time_ms, record["step"]) for name, value in values.items()]


def _name(name: str) -> str:
    """A name that MLflow accepts: a path of plain parts of limited length."""
    parts = [part for part in re.sub(r"[^\w\-. :/]", "_", name).split("/") if part.strip(".")]
    plain = "/".join(parts)
    if len(plain) <= _NAME_LENGTH:
        return plain
    return f"{plain[: _NAME_LENGTH - 9]}-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"
