"""What the stages of one run share in the flow's process: workers, trainer, tracker and console.

Stages are Prefect tasks with JSON-sized inputs; they find the session of the flow that called them here.
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
from rl_core.errors import RollforwardError
from rl_core.ledger import Ledger
from rl_core.models.load import check_model_folder, check_shape, load_tokenizer, same_shape, stop_tokens
from rl_core.models.tiny import save_tiny_model
from rl_core.rollout.chat import ChatTemplate
from rl_core.rollout.partners import chat_template
from rl_core.rollout.tool_runner import tool_schemas
from rl_core.rollout.toolbox import row_schemas
from rl_core.status import State, StatusWriter
from rl_core.storage import Store
from rl_core.trainer import PPOTrainer
from rl_core.warm_start import FOLDER as WARM_START
from tasks.prefect_pages import PrefectPages
from tasks.registry import Registry
from tasks.runs import Run, committed_step
from tasks.traces import Traces
from tasks.tracking import Tracker, default_tracking_uri, local_tracking_uri

_current: ContextVar["Session"] = ContextVar("session")
MLFLOW_STATES: Any = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


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
        self._resources = ExitStack()
        self._trainer: PPOTrainer | None = None
        self._seconds: list[float] = []

    @property
    def tracking_uri(self) -> str:
        """Where MLflow keeps this run."""
        return self.config.tracking.uri or default_tracking_uri(self.run.home)

    @cached_property
    def tracker(self) -> Tracker:
        """The run's MLflow run, opened with its config."""
        is_file = self.tracking_uri == local_tracking_uri(self.run.home)
        local = self.run.home / "mlartifacts" if is_file else None
        digest = config_hash(self.config)
        tracker = Tracker(self.tracking_uri, self.config.tracking.experiment, self.run.name, digest, local)
        tracker.log_config(flatten(self.config), to_yaml(self.config), digest)
        return tracker

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

    @property
    def policy_model(self) -> Path:
        """Folder of the policy that reinforcement starts from: after the warm start, or the base model."""
        if not self.config.warm_start.steps:
            return self.base_model
        return self.local_copy(WARM_START)

    def local_copy(self, folder: str) -> Path:
        """A committed folder of the store as a folder on this machine."""
        local = self.store.local_path(folder)
        if local is None:
            local = self.run.home / "cache" / self.run.name / folder
            if not local.exists():
                self.store.download(folder, local)
        return local

    def downloaded(self, version: str) -> Path:
        """A registered version's model folder on this machine, downloaded once."""
        return self.registry.local_folder(version, self.run.home / "cache")

    @cached_property
    def roles(self) -> Roles:
        """The worker groups, started with Ray."""
        self._resources.enter_context(ray_session(self.run.home, self.config.places, self.verbose))
        roles = Roles(self.config, self.run.url)
        self._resources.callback(roles.close)
        return roles

    @property
    def trainer(self) -> PPOTrainer:
        """The trainer, started at the last committed step."""
        if self._trainer is None:
            manifest = self.store.read_manifest("data")
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
            )
            trainer.start(str(self.policy_model))
            self._trainer = trainer
        return self._trainer

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
        self.status.update(step=step, phase="", seconds_per_step=mean, reward=metrics.get("reward/mean"))
        left = self.status.status.seconds_left
        self.console.step(step, total, metrics, left)
        self.pages.progress(step, total, f"step {step} of {total}, {duration(left)} left")

    @cached_property
    def traces(self) -> Traces:
        """What sends trajectories to MLflow."""
        return Traces(self.tracker, self.store, self.tokenizer, self.config.tracking.traces_per_step)

    def flush_metrics(self, step: int) -> None:
        """Sends to MLflow what it does not have yet of the records and traces up to the committed `step`."""
        self.tracker.flush(self.records(step))
        self.traces.flush(step)

    def records(self, upto: int | None = None) -> list[dict[str, Any]]:
        """Ledger records of all committed steps, or of those up to `upto`."""
        return Ledger(self.store).records(self.committed_step() if upto is None else upto)

    def committed_step(self) -> int:
        """The newest step that a checkpoint covers, 0 when there is none."""
        return committed_step(self.store)

    def drop_workers(self) -> None:
        """Ends workers and Ray; the next stage that needs them starts anew from the last commit."""
        self._trainer = None
        self.__dict__.pop("roles", None)
        self._resources.close()


@contextmanager
def open_session(run: Run, verbose: bool = False, keep_data: bool = False) -> Iterator[Session]:
    """The session of a flow; everything that it started is gone afterwards, and MLflow knows how the run ended."""
    session = Session(run, verbose, keep_data)
    token = _current.set(session)
    state: State = "finished"
    words = ""
    try:
        yield session
    except BaseException as error:
        state = "failed" if isinstance(error, Exception) else "stopped"
        # What other libraries say may be long, and may hold what no file should.
        words = str(error).partition("\n\n")[0] if isinstance(error, RollforwardError) else type(error).__name__
        session.pages.line(f"✗ {state}: {words}")
        raise
    finally:
        session.drop_workers()
        session.status.close(state, words if state == "failed" else "")
        if "tracker" in session.__dict__:
            session.tracker.end(MLFLOW_STATES[state])
        _current.reset(token)
        sys.stdout.flush()
