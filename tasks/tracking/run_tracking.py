"""Sends a run to MLflow: parameters and tags, metrics from the committed ledger, and traces of trajectories."""

from contextlib import suppress
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from rl_core.config.compose import config_hash, flatten, to_yaml
from rl_core.errors import RollforwardError
from rl_core.storage import run_files
from rl_core.storage.ledger import Ledger
from rl_core.storage.status import State
from rl_core.storage.store import Store
from tasks.runs.run import Run, committed_step
from tasks.tracking.outage import Throttle
from tasks.tracking.stale_runs import MLFLOW_STATES, STORE_TAG, close_stale_runs, store_url
from tasks.tracking.traces import Traces
from tasks.tracking.tracker import Records, Tracker, default_tracking_uri, local_tracking_uri


class RunTracking:
    """Sends each committed record of one run to MLflow once; during an outage the ledger stores them."""

    def __init__(self, run: Run) -> None:
        self.run, self.config, self.store = run, run.composed.config, run.store
        self.uri = self.config.tracking.uri or default_tracking_uri(run.home)
        self._throttle = Throttle()
        self._traces: Traces | None = None

    @cached_property
    def tracker(self) -> Tracker:
        """The run's MLflow run; it is opened, and its config logged, once MLflow can be reached."""
        is_file = self.uri == local_tracking_uri(self.run.home)
        local = self.run.home / "mlartifacts" if is_file else None
        experiment, created = self.config.tracking.experiment, self.store.read_json(run_files.RUN)["created"]
        # The name alone is not unique: another home folder, or a deleted run, may have used it.
        return Tracker(self.uri, experiment, self.run.name, f"{created:.6f}", local, self._describe)

    def _describe(self, tracker: Tracker) -> None:
        tracker.log_config(flatten(self.config), to_yaml(self.config), config_hash(self.config))
        tags = {STORE_TAG: store_url(self.store)}
        if manifest := self.store.read_manifest(run_files.DATA):
            tags["rollforward.data_hash"] = manifest["meta"]["data_hash"]
        tracker.set_tags(tags)
        close_stale_runs(tracker, Store(self.config.storage.root or str(self.run.home / "runs")))

    def trace_with(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Also sends trajectories from now on, decoded with this tokenizer."""
        self._traces = Traces(self.tracker, self.store, tokenizer, self.config.tracking.traces_per_step)

    def flush_paced(self, step: int) -> None:
        """As `flush`, but skipped if it would slow down training."""
        if self._throttle.ready:
            with self._throttle.measure():
                self.flush(step)

    def flush(self, step: int) -> None:
        """Sends the records and traces up to the committed `step` that MLflow lacks; none during an outage."""
        self.tracker.flush(self._records_to(step))
        if self._traces:
            self._traces.flush(step)

    def send(self, step: int) -> None:
        """As `flush`, but raises TransientError on an outage."""
        self.tracker.send(self._records_to(step))
        if self._traces:
            self._traces.send(step)

    def _records_to(self, step: int) -> Records:
        return lambda after: Ledger(self.store).records(step, max(after, 0))

    def end(self, state: State, flush: bool = True) -> None:
        """Sends the remaining records, then closes the MLflow run; does nothing if it was never opened."""
        if "tracker" not in self.__dict__ or self.run.lease.lost:
            return
        if flush:
            with suppress(RollforwardError):  # the run may have ended because of its storage
                self.flush(committed_step(self.store))
        self.tracker.end(MLFLOW_STATES[state])
