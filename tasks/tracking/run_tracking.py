"""A run in MLflow: its parameters and tags, metrics from the committed ledger, and traces of trajectories."""

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
from tasks.tracking.outage import Pace
from tasks.tracking.stale_runs import MLFLOW_STATES, STORE_TAG, end_orphans, store_url
from tasks.tracking.traces import Traces
from tasks.tracking.tracker import Records, Tracker, default_tracking_uri, local_tracking_uri


class RunTracking:
    """Sends what one run has committed to MLflow, each record once; the ledger holds it during an outage."""

    def __init__(self, run: Run) -> None:
        self.run, self.config, self.store = run, run.composed.config, run.store
        self.uri = self.config.tracking.uri or default_tracking_uri(run.home)
        self._pace = Pace()
        self._traces: Traces | None = None

    @cached_property
    def tracker(self) -> Tracker:
        """The run's MLflow run, which is opened, with its config, when MLflow can be reached."""
        is_file = self.uri == local_tracking_uri(self.run.home)
        local = self.run.home / "mlartifacts" if is_file else None
        experiment, began = self.config.tracking.experiment, self.store.read_json(run_files.RUN)["created"]
        # Not by name alone: another home folder, or the same one once a run was deleted, may have a run of that name.
        return Tracker(self.uri, experiment, self.run.name, f"{began:.6f}", local, self._describe)

    def _describe(self, tracker: Tracker) -> None:
        tracker.log_config(flatten(self.config), to_yaml(self.config), config_hash(self.config))
        tags = {STORE_TAG: store_url(self.store)}
        if manifest := self.store.read_manifest(run_files.DATA):
            tags["rollforward.data_hash"] = manifest["meta"]["data_hash"]
        tracker.set_tags(tags)
        end_orphans(tracker, Store(self.config.storage.root or str(self.run.home / "runs")))

    def trace_with(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Sends trajectories too from now on, as text of this tokenizer."""
        self._traces = Traces(self.tracker, self.store, tokenizer, self.config.tracking.traces_per_step)

    def flush_paced(self, step: int) -> None:
        """As `flush`, but skipped where it would slow training down."""
        if self._pace.due:
            with self._pace.timed():
                self.flush(step)

    def flush(self, step: int) -> None:
        """Sends to MLflow the records and traces up to the committed `step` that it lacks; sends none in an outage."""
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
        """Records how the run ended, if anything of it was sent, after what is left to send."""
        if "tracker" not in self.__dict__ or self.run.lease.lost:
            return
        if flush:
            with suppress(RollforwardError):  # storage may be what ended the run
                self.flush(committed_step(self.store))
        self.tracker.end(MLFLOW_STATES[state])
