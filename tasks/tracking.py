"""Metrics of a run in MLflow: every ledger record once, whatever dies in between, and no outage stops training.

MLflow is imported inside functions so that `quiet_mlflow` can set its environment first.
"""

import logging
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_core.errors import InputError, RollforwardError, TransientError

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

STEP_METRIC = "rollforward/step"
RUN_TAG = "rollforward.run"
KEY_TAG = "rollforward.key"
CONFIG_TAG = "rollforward.config_hash"

_METRICS_PER_BATCH = 1000
_PARAMS_PER_BATCH = 100
_PARAM_LENGTH = 6000
_PROBE_TIMEOUT_S = 3
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


def quiet_mlflow() -> None:
    """Set MLflow's environment (no telemetry, short retries, no progress bars) unless the user did; call it first."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def local_tracking_uri(home: Path) -> str:
    """The SQLite file of the home folder."""
    return f"sqlite:///{home.absolute()}/mlflow.db"


def default_tracking_uri(home: Path) -> str:
    """What tracks runs when their config does not say: MLFLOW_TRACKING_URI, or the SQLite file of the home folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or local_tracking_uri(home)


def check_tracking(uri: str) -> None:
    """Make sure that runs can be tracked at `uri`, within seconds and before anything else starts.

    Raises `InputError` when no MLflow server answers there, the SQLite file cannot be written, or it is neither.
    """
    if uri.startswith(("http://", "https://")):
        if problem := _server_problem(uri):
            raise InputError(
                expected=f"an MLflow server at {uri}",
                seen=problem,
                where="tracking.uri",
                fix="start it with `mlflow server --host … --port …`, or leave tracking.uri unset to use a local file",
            )
    elif uri.startswith("sqlite:///"):
        if problem := _sqlite_problem(Path(uri.removeprefix("sqlite:///"))):
            raise InputError(
                expected="a SQLite file that can be written",
                seen=problem,
                where=f"tracking.uri = {uri}",
                fix="make the folder writable, or set another place with tracking.uri=sqlite:////absolute/path/mlflow.db",
            )
    else:
        raise InputError(
            expected="http://…, https://… or sqlite:////absolute/path/mlflow.db",
            seen=repr(uri),
            where="tracking.uri",
            fix="give one of these forms, or leave tracking.uri unset to use a local file",
        )


def _server_problem(uri: str) -> str | None:
    """One request without retries; None when an MLflow server answers, else what is wrong in a few words."""
    from mlflow.exceptions import MlflowException
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    try:
        answer = http_request(
            get_default_host_creds(uri.rstrip("/")), "/health", "GET",
            max_retries=0, timeout=_PROBE_TIMEOUT_S, raise_on_status=False,
        )  # fmt: skip
    except (MlflowException, OSError) as error:
        reason = re.search(r"\[Errno -?\d+\] ([\w ,-]+)", str(error))
        if reason:
            return reason.group(1).lower()
        return f"no answer within {_PROBE_TIMEOUT_S} s" if "timed out" in str(error) else str(error)
    # A server behind a login answers 401 or 403 here; its credentials are checked by the first real call.
    return None if answer.status_code in (200, 401, 403) else f"an answer with HTTP status {answer.status_code}"


def _sqlite_problem(path: Path) -> str | None:
    """None when the file can be opened and locked for writing (made if missing), else what is wrong."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(path, timeout=_PROBE_TIMEOUT_S)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
    except (OSError, sqlite3.Error) as error:
        return f"{path}: {error}"
    return None


def mlflow_client(uri: str) -> "MlflowClient":
    """A client whose tracking server and registry are both at `uri`, independent of MLflow's global settings."""
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


@contextmanager
def mlflow_errors(uri: str) -> Iterator[None]:
    """Turn MLflow's exceptions into `InputError` (what it refuses) or `TransientError` (everything else)."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code in _CALLER_MISTAKES:
            raise InputError(
                expected="a request that MLflow accepts",
                seen=error.message,
                where=f"MLflow at {uri}",
                fix="change the name or setting that the message speaks of, or the credentials "
                "(MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD)",
            ) from error
        raise TransientError(f"MLflow at {uri} failed: {error.message}") from error
    except NotImplementedError as error:
        raise InputError(
            expected="an MLflow server that can do what is asked of it",
            seen=str(error),
            where=f"MLflow at {uri}",
            fix="update the server to the version of MLflow that is installed here",
        ) from error
    except OSError as error:
        raise TransientError(f"MLflow at {uri} or its artifact store failed: {error}") from error


class Outage:
    """Lets training go on while MLflow fails; warns when that begins and when it is over."""

    def __init__(self, uri: str, what: str) -> None:
        """`what` names in the warning what is sent."""
        self.uri, self.what = uri, what
        self._warned = False

    def probe(self) -> None:
        """Raises TransientError while no server answers: not every step shall sit through MLflow's retries."""
        if self.uri.startswith("http") and (problem := _server_problem(self.uri)):
            raise TransientError(f"MLflow at {self.uri} failed: {problem}")

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Sending to MLflow; an error ends the block and is only warned about."""
        try:
            yield
        except RollforwardError as error:
            if not self._warned:
                logger.warning("%s are kept and sent later. %s", self.what, error)
            self._warned = True
        else:
            if self._warned:
                logger.warning("MLflow at %s is back; %s were sent.", self.uri, self.what.lower())
            self._warned = False


class Tracker:
    """The one MLflow run of a Rollforward run, found by its name or made on first use.

    Opening happens at the first call, so a tracker can be made while the server is down. `flush` and `end` never
    raise; the other methods raise `TransientError` on an outage and `InputError` for what MLflow refuses.
    """

    def __init__(self, uri: str, experiment: str, run_name: str, run_key: str, artifact_root: Path | None) -> None:
        """Artifacts of a new experiment go below `artifact_root`; None leaves the place to the server."""
        self.uri, self.experiment, self.run_name, self.run_key = uri, experiment, run_name, run_key
        self._artifact_root = artifact_root
        self._client = mlflow_client(uri)
        self._run_id: str | None = None
        self._last_step: int | None = None
        self._outage = Outage(uri, "Metrics")

    @property
    def run_id(self) -> str:
        """Id of the MLflow run; the run is opened (status RUNNING) if it is not yet."""
        if self._run_id is None:
            with mlflow_errors(self.uri):
                self._run_id = self._open()
        return self._run_id

    def log_config(self, flat: Mapping[str, object], yaml_text: str, config_hash: str) -> None:
        """Log parameters (those that are not there yet), the whole config as `config.yaml`, and its hash as a tag."""
        from mlflow.entities import Param

        run_id = self.run_id
        with mlflow_errors(self.uri):
            there = self._client.get_run(run_id).data.params
            new = [Param(key, str(value)[:_PARAM_LENGTH]) for key, value in flat.items() if key not in there]
            for start in range(0, len(new), _PARAMS_PER_BATCH):
                self._client.log_batch(run_id, params=new[start : start + _PARAMS_PER_BATCH])
            self._client.log_text(run_id, yaml_text, "config.yaml")
            self._client.set_tag(run_id, CONFIG_TAG, config_hash)

    def flush(self, records: Sequence[Mapping[str, Any]]) -> int:
        """Send the records that MLflow does not have yet and return how many were sent.

        A record is {"step": int, "time": seconds since 1970, "metrics": {name: number}}. Pass all records of the run
        each time: what an outage held back is sent by the first call that gets through.
        """
        sent = 0
        with self._outage.passing():
            self._outage.probe()
            run_id, last_step = self.run_id, self._last_logged_step()
            new = sorted((r for r in records if r["step"] > last_step), key=lambda r: r["step"])
            for batch, count, step in _batches(new):
                with mlflow_errors(self.uri):
                    self._client.log_batch(run_id, metrics=batch)
                self._last_step = step
                sent += count
            return sent
        # A call that failed here may still have arrived there: ask again before the next one.
        self._last_step = None
        return sent

    def log_file(self, content: Path | str, name: str) -> None:
        """Save a file (a path) or a text (a string) as the artifact `name`."""
        text = content.read_text(encoding="utf-8") if isinstance(content, Path) else content
        run_id = self.run_id
        with mlflow_errors(self.uri):
            self._client.log_text(run_id, text, name)

    @property
    def page(self) -> str:
        """Address of the run's page on a server."""
        run_id = self.run_id
        with mlflow_errors(self.uri):
            experiment_id = self._client.get_run(run_id).info.experiment_id
        return f"{self.uri.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"

    def describe(self, markdown: str) -> None:
        """Put a text at the top of the run's page."""
        self.set_tags({"mlflow.note.content": markdown})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags on the run."""
        from mlflow.entities import RunTag

        run_id = self.run_id
        with mlflow_errors(self.uri):
            self._client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def end(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """Close the run; an outage is only warned about, so that it cannot hide how the run itself ended."""
        try:
            run_id = self.run_id
            with mlflow_errors(self.uri):
                self._client.set_terminated(run_id, status=status)
        except RollforwardError as error:
            logger.warning("The MLflow run stays open. %s", error)

    def _open(self) -> str:
        found = self._client.search_runs(
            [self._experiment_id()], f"tags.`{RUN_TAG}` = '{self.run_name}'", order_by=["attributes.start_time ASC"]
        )
        if not found:
            tags = {RUN_TAG: self.run_name, KEY_TAG: self.run_key}
            run = self._client.create_run(self._experiment_id(), run_name=self.run_name, tags=tags)
            return str(run.info.run_id)
        run_id = str(found[0].info.run_id)
        self._client.set_tag(run_id, KEY_TAG, self.run_key)
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self.experiment)
        if found is None:
            # MLflow's own default is a folder below the current directory.
            location = self._artifact_root.absolute().as_uri() if self._artifact_root else None
            return str(self._client.create_experiment(self.experiment, artifact_location=location))
        if found.lifecycle_stage == "deleted":
            raise InputError(
                expected="an active MLflow experiment",
                seen=f"experiment {self.experiment!r} is deleted",
                where=f"MLflow at {self.uri}",
                fix=f"run `mlflow experiments restore -x {found.experiment_id}`, or set another tracking.experiment",
            )
        return str(found.experiment_id)

    def _last_logged_step(self) -> int:
        """Step of the newest record that MLflow has, -1 without any; read once, then kept in memory."""
        if self._last_step is None:
            with mlflow_errors(self.uri):
                history = self._client.get_metric_history(self.run_id, STEP_METRIC)
            self._last_step = max((int(point.value) for point in history), default=-1)
        return self._last_step


def _batches(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[list[Any], int, int]]:
    """Pack whole records into calls: (metrics, number of records, last step). MLflow stores one call whole or not."""
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
    """A record's metrics with its marker; characters that MLflow forbids in names become `_`."""
    from mlflow.entities import Metric

    values = {**record["metrics"], STEP_METRIC: record["step"]}
    time_ms = int(record["time"] * 1000)
    return [Metric(re.sub(r"[^\w\-. :/]", "_", n), float(v), time_ms, record["step"]) for n, v in values.items()]
