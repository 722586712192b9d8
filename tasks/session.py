"""What the stages of one run share in the flow's process: workers, trainer, tracker and console.

Stages are Prefect tasks with JSON-sized inputs; they find the session of the flow that called them here.
"""

import logging
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rl_core.cluster.resources import ray_session
from rl_core.cluster.roles import Roles
from rl_core.config.compose import config_hash, flatten, to_yaml
from rl_core.config.schema import RunConfig
from rl_core.console import Console, duration
from rl_core.data.dataset import RLHFDataset, ToolsOf
from rl_core.errors import RollforwardError, TrainingError, TransientError, short_message
from rl_core.models.load import check_model_folder, check_shape, load_tokenizer, same_shape, stop_tokens
from rl_core.models.tiny import save_tiny_model
from rl_core.rollout.agent.chat import ChatTemplate
from rl_core.rollout.agent.responders import chat_template
from rl_core.rollout.agent.tool_runner import tool_schemas
from rl_core.rollout.agent.toolbox import row_schemas
from rl_core.runtime.watchdog import Watchdog
from rl_core.storage import run_files
from rl_core.storage.ledger import Ledger
from rl_core.storage.run_files import MANIFEST
from rl_core.storage.status import State, StatusWriter
from rl_core.storage.store import Json, Store
from rl_core.trainer.failed_steps import failed_step
from rl_core.trainer.trainer import PPOTrainer
from tasks.prefect_server.artifacts import PrefectPages
from tasks.registry.registry import Registry
from tasks.runs.hang_report import keep_stall, own_frames
from tasks.runs.run import Run, committed_step
from tasks.runs.signals import Stopping, signals_ignored
from tasks.tracking.outage import Pace
from tasks.tracking.stale_runs import MLFLOW_STATES, STORE_TAG, end_orphans, store_url
from tasks.tracking.traces import Traces
from tasks.tracking.tracker import Records, Tracker, default_tracking_uri, local_tracking_uri

logger = logging.getLogger(__name__)

_current: ContextVar["Session"] = ContextVar("session")


def current_session() -> "Session":
    """The session of the running flow."""
    return _current.get()


class Session:
    """One run in one process; workers start when a stage first needs them and end with the session."""

    def __init__(self, run: Run, verbose: bool, keep_data: bool = False) -> None:
        """Cheap; no worker is started. `keep_data`: the run's rows are used whatever has become of their files."""
        self.run, self.verbose, self.keep_data = run, verbose, keep_data
        if not verbose:
            transformers_logging.disable_progress_bar()
        self.config: RunConfig = run.composed.config
        self.store: Store = run.store
        self.pages = PrefectPages(run.name)
        self.console = Console(also=self.pages.line)
        self.status = StatusWriter(self.store, self.config.trainer.steps, self.committed_step())
        self.stopping = Stopping(self.config.trainer.grace_s, self.console.note)
        self.watchdog = Watchdog(self.config.trainer.silence_s, self._on_hang)
        self._resources = ExitStack()
        self._trainer: PPOTrainer | None = None
        self._seconds: list[float] = []
        self._verified: set[str] = set()
        self._copied: set[tuple[str, str | None]] = set()
        self._pace = Pace()
        self.failures: list[str] = []
        """What each attempt of the present stage that may be repeated ended with."""
        for key, (before, now) in run.changed_layout.items():
            self.console.note(f"{key} was {before} when the run began, now {now}: results are equal within rounding")

    @property
    def tracking_uri(self) -> str:
        """Where MLflow keeps this run."""
        return self.config.tracking.uri or default_tracking_uri(self.run.home)

    @cached_property
    def tracker(self) -> Tracker:
        """The run's MLflow run, which is opened, with its config, when MLflow can be reached."""
        is_file = self.tracking_uri == local_tracking_uri(self.run.home)
        local = self.run.home / "mlartifacts" if is_file else None
        experiment, began = self.config.tracking.experiment, self.store.read_json(run_files.RUN)["created"]
        # Not by name alone: another home folder, or the same one once a run was deleted, may have a run of that name.
        return Tracker(self.tracking_uri, experiment, self.run.name, f"{began:.6f}", local, self._describe)

    def _describe(self, tracker: Tracker) -> None:
        tracker.log_config(flatten(self.config), to_yaml(self.config), config_hash(self.config))
        tags = {STORE_TAG: store_url(self.store)}
        if manifest := self.store.read_manifest(run_files.DATA):
            tags["rollforward.data_hash"] = manifest["meta"]["data_hash"]
        tracker.set_tags(tags)
        end_orphans(tracker, Store(self.config.storage.root or str(self.run.home / "runs")))

    @cached_property
    def registry(self) -> Registry:
        """The registered model that the run's versions belong to."""
        return Registry(self.tracking_uri, self.config.registry.model_name)

    @cached_property
    def base_model(self) -> Path:
        """Folder of the model that the run starts from; the offline model is built on first use."""
        if self.config.model.path != "tiny":
            return check_model_folder(self.config.model.path)
        folder = self.run.home / "models" / f"tiny-{config_hash(self.config)[:16]}"
        if not folder.exists():
            draft = folder.with_name(f"{folder.name}.draft")
            shutil.rmtree(draft, ignore_errors=True)
            length = self.config.data.max_prompt_length + self.config.data.max_response_length
            save_tiny_model(draft, self.config.model.tiny, length, self.config.trainer.seed)
            draft.rename(folder)
        return folder

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return load_tokenizer(self.base_model)

    @cached_property
    def tools(self) -> list[dict[str, Any]]:
        """Schemas of the tools that the policy may call."""
        return tool_schemas(self.config.agent)

    @cached_property
    def tools_of(self) -> ToolsOf:
        """The schemas of a row's tools."""
        return row_schemas(self.tools)

    @cached_property
    def chat(self) -> ChatTemplate:
        """The chat template as it is used within conversations; InputError when it cannot be."""
        return chat_template(self.tokenizer, self.tools, self.config.agent, stop_tokens(self.base_model))

    @cached_property
    def train_rows(self) -> RLHFDataset:
        """The committed training rows."""
        return RLHFDataset.load(self.store, "train", self.tokenizer, self.tools_of)

    @cached_property
    def val_rows(self) -> RLHFDataset:
        """The committed held-out rows."""
        return RLHFDataset.load(self.store, "val", self.tokenizer, self.tools_of)

    def verified_manifest(self, folder: str, content: bool = True) -> Json | None:
        """The manifest of a committed folder whose files are all as committed; None when it has to be made.

        Looked at once an attempt; what is damaged is told and removed. Without `content` it is by names and sizes only.
        """
        if folder not in self._verified and self.store.exists(f"{folder}/{MANIFEST}"):
            if problems := self.store.verify(folder, content):
                self.warn(f"{self.store.url}/{folder} is damaged and is made again: {'; '.join(problems)}")
                self.store.remove(folder)
            self._verified.add(folder)
        return self.store.read_manifest(folder)

    def warn(self, text: str) -> None:
        """Tells what happened to the run, now and in its report."""
        self.console.note(f"! {text}")
        notes = self.store.read_json(run_files.NOTES) if self.store.exists(run_files.NOTES) else []
        self.store.write_json(run_files.NOTES, [*notes, {"time": time.time(), "text": text}])

    @property
    def policy_model(self) -> Path:
        """Folder of the policy that reinforcement starts from: after the warm start, or the base model."""
        if not self.config.warm_start.steps:
            return self.base_model
        return self.local_copy(run_files.WARM_START)

    def local_copy(self, folder: str) -> Path:
        """A committed folder of the store as a folder on this machine."""
        local = self.store.local_path(folder)
        if local is None:
            local = self.run.home / "cache" / self.run.name / folder
            key = folder, (self.store.read_manifest(folder) or {}).get("sha256")
            if key not in self._copied:
                self.store.download(folder, local)
                self._copied.add(key)
        return local

    def downloaded(self, version: str) -> Path:
        """A registered version's model folder on this machine, downloaded once."""
        return self.registry.local_folder(version, self.run.home / "cache")

    @cached_property
    def roles(self) -> Roles:
        """The worker groups, started with Ray."""
        self._resources.enter_context(ray_session(self.run.home, self.config.slots, self.verbose))
        self.run.lease.check()  # a run that another process has taken over has its workers there
        roles = Roles(self.config, self.run.url)
        self._resources.callback(self._end_workers, roles)
        return roles

    def _end_workers(self, roles: Roles) -> None:
        with suppress(RollforwardError):  # if the lease is lost or storage is away, Ray ends this process's workers
            self.run.lease.check()
            roles.close()

    @property
    def trainer(self) -> PPOTrainer:
        """The trainer, started at the last committed step."""
        if self._trainer is None:
            manifest = self.store.read_manifest(run_files.DATA)
            assert manifest is not None, "data is prepared before training"
            trainer = PPOTrainer(
                self.config,
                self.store,
                self.tokenizer,
                self.train_rows,
                manifest["meta"]["data_hash"],
                self.roles,
                self._show_step,
                self.flush_metrics,
                self.status.phase,
                self.stopping.asked,
                self.warn,
            )
            trainer.start(str(self.policy_model))
            self._trainer = trainer
        return self._trainer

    def trained_to(self, step: int) -> PPOTrainer:
        """The trainer at a step that was committed; steps whose checkpoints are damaged are trained again."""
        trainer = self.trainer
        if trainer.step > step:
            raise TrainingError(f"the policy that is asked for is that of step {step}, training is at {trainer.step}")
        if trainer.step < step:
            trainer.fit(step)
        return trainer

    def load_model(self, folder: Path) -> None:
        """Puts another model into the workers, which start anew where theirs is of another shape; the trainer starts
        anew from the last commit when it is needed again. Raises InputError when the model is too small for the rows.
        """
        check_shape(folder, self.config.max_length, self.config.rollout.tensor_parallel_size)
        if not same_shape(folder, self.policy_model):
            self.drop_workers()
        self._trainer = None
        self.roles.init_models(str(folder), 1)
        self.roles.rollout.push_weights(0)

    def _show_step(self, record: dict[str, Any]) -> None:
        step, total, metrics = record["step"], self.config.trainer.steps, record["metrics"]
        self._seconds = [*self._seconds[-9:], metrics["time/step"]]
        mean = sum(self._seconds) / len(self._seconds)
        self.stopping.step_began(mean)
        self.status.update(step=step, phase="", seconds_per_step=mean, reward=metrics.get("reward/mean"))
        left = self.status.status.seconds_left
        self.console.step(step, total, metrics, left)
        self.pages.progress(step, total, f"step {step} of {total}, {duration(left)} left")

    @cached_property
    def traces(self) -> Traces:
        """What sends trajectories to MLflow."""
        return Traces(self.tracker, self.store, self.tokenizer, self.config.tracking.traces_per_step)

    def flush_metrics(self, step: int) -> None:
        """What `flush_now` does, unless that would slow training down."""
        if self._pace.due:
            with self._pace.timed():
                self.flush_now(step)

    def flush_now(self, step: int) -> None:
        """Sends to MLflow what it does not have yet of the records and traces up to the committed `step`.

        During an outage nothing is sent, and the ledger keeps it.
        """
        self.tracker.flush(self._records_to(step))
        self.traces.flush(step)

    def send_metrics(self, step: int) -> None:
        """Sends them for certain; TransientError on an outage."""
        self.tracker.send(self._records_to(step))
        self.traces.send(step)

    def _records_to(self, step: int) -> Records:
        return lambda after: Ledger(self.store).records(step, max(after, 0))

    def records(self, upto: int | None = None) -> list[dict[str, Any]]:
        """Ledger records of all committed steps, or of those up to `upto`."""
        return Ledger(self.store).records(self.committed_step() if upto is None else upto)

    def committed_step(self) -> int:
        """The newest step that a checkpoint covers, 0 when there is none."""
        return committed_step(self.store)

    def drop_workers(self, patience_s: float = 0.0) -> None:
        """Ends workers and Ray; the next stage that needs them starts anew from the last commit.

        A finished step is committed before, if all its shards are there within `patience_s` seconds. Not where rollouts
        that were made ahead belong to it, which the workers may still have.
        """
        if self._trainer and not self.config.max_staleness:
            self._trainer.checkpointer.rescue(self._trainer.step, patience_s)
        self._trainer = None
        self._verified.clear()
        self._copied.clear()
        self.__dict__.pop("roles", None)
        self._resources.close()

    def keep_stall(self, why: str) -> str:
        """Writes who waits for what, `why`, and what this process does to a file below the home folder; returns where,
        or why not."""
        try:
            return str(keep_stall(self.run.home, self.run.name, self.status.status, why))
        except OSError as error:
            return f"not kept: {error}"

    def _on_hang(self, silent_s: float) -> None:
        """What is said before this process ends because it got nowhere."""
        doing, frames = self.status.status.doing, own_frames(threading.main_thread().ident or 0)
        why = f"no progress for {silent_s:.0f} s (trainer.stall_timeout_s): {doing}; this process is in {frames}"
        self.console.failure(TransientError(why))
        self.console.note(f"the same command with --run {self.run.name} continues from the last committed step")
        self.console.note(f"stacks: {self.keep_stall(why)}")  # whose disk may be what hangs
        self.status.close("failed", why)
        if "tracker" in self.__dict__:
            self.tracker.end("FAILED")


@contextmanager
def open_session(run: Run, verbose: bool = False, keep_data: bool = False) -> Iterator[Session]:
    """The session of a flow; everything that it started is gone afterwards, and MLflow knows how the run ended."""
    session = Session(run, verbose, keep_data)
    token = _current.set(session)
    state: State = "finished"
    why = ""
    with session.watchdog:
        try:
            yield session
        except BaseException as error:
            state = "failed" if isinstance(error, Exception) else "stopped"
            why = short_message(error)
            session.pages.line(f"✗ {state}: {why}")
            if state == "failed" and (way := to_replay(session)):
                error.add_note(way)
            raise
        finally:
            with signals_ignored():
                close_session(session, state, why)
            _current.reset(token)
            sys.stdout.flush()


def close_session(session: Session, state: State, why: str) -> None:
    """Ends workers and says everywhere how the run ended; no error of it hides how that was."""
    try:
        session.drop_workers(session.stopping.left_s)
    except Exception as error:
        logger.warning("workers were not ended, and end with this process: %s", error)
    session.status.close(state, why if state == "failed" else "")
    if "tracker" in session.__dict__ and not session.run.lease.lost:
        with suppress(RollforwardError):  # storage may be what ended the run
            session.flush_now(session.committed_step())
        session.tracker.end(MLFLOW_STATES[state])
    session.run.close()


def to_replay(session: Session) -> str:
    """What a person may type to look at the step that failed; empty when none is kept."""
    with suppress(RollforwardError):  # storage may be what has failed
        if failed := failed_step(session.store, session.committed_step()):
            run = session.run.url if session.config.storage.root else session.run.name
            return f"rollforward replay {run} {failed}   computes the step that failed again"
    return ""
