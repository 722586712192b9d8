"""Trains a tiny random model with the real trainer: to repeat four digits with each algorithm, and to use a tool.

`flows.home.prepare_environment` must run before this module is imported.
"""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.cluster.base_worker import Worker
from rl_core.cluster.dispatch import Dispatch, register
from rl_core.cluster.placement import reserve
from rl_core.cluster.resources import ray_session, resource_pools
from rl_core.cluster.roles import Roles, start_groups
from rl_core.cluster.training_workers import ActorRolloutRefWorker, CriticWorker
from rl_core.config.compose import compose
from rl_core.config.schema import RunConfig
from rl_core.data.dataset import RLHFDataset
from rl_core.data.prepare import prepare_data
from rl_core.data.protocol import Metrics
from rl_core.models.load import load_tokenizer, stop_tokens
from rl_core.models.tiny import save_tiny_model
from rl_core.rollout.agent.responders import chat_template
from rl_core.rollout.agent.tool_runner import tool_schemas
from rl_core.storage import run_files
from rl_core.storage.store import Store
from rl_core.trainer.observer import NullObserver
from rl_core.trainer.trainer import PPOTrainer
from rl_core.trainer.warm_start import warm_start

TASK = "learn_copy"
TARGET, WINDOW = 0.9, 3
"""Mean score that counts as learned, and the number of steps it is averaged over."""


@dataclass(frozen=True)
class Case:
    """A recipe (name or path), settings for the tiny model, the minimum and maximum steps over five seeds (`band`), and
    the recipe of the task.

    Without a band (not measured) the task's own number of steps is the limit.
    """

    recipe: str
    settings: tuple[str, ...] = ()
    band: tuple[int, int] | None = None
    task: str = TASK


# Unnormalised advantages are small at first, so the entropy bonus must be small too; with few responses per step,
# whether learning starts depends on chance.
UNSCALED = ("actor.entropy_coef=0.005", "data.train_batch_size=64")
CASES = {
    "grpo": Case("grpo", band=(82, 114)),
    "dr_grpo": Case("dr_grpo", UNSCALED, band=(51, 74)),
    "gspo": Case("gspo", band=(52, 85)),
    "cispo": Case("cispo", ("actor.entropy_coef=0.05", "data.train_batch_size=64"), band=(28, 123)),
    "rloo": Case("rloo", UNSCALED, band=(51, 74)),
    "last_digit": Case("grpo", ("data.source=last_digit", "data.max_response_length=1"), band=(57, 158)),
    "reinforce_pp": Case("reinforce_pp", ("data.train_batch_size=512",), band=(53, 91)),
    "ppo": Case(
        "ppo", ("data.train_batch_size=256", "critic.optim.lr=3.0e-3", "actor.entropy_coef=0.05"), band=(70, 148)
    ),
    "opo": Case("opo", UNSCALED, band=(54, 64)),
    "gpg": Case("gpg", ("actor.entropy_coef=0.01", "data.train_batch_size=64"), band=(66, 109)),
    "dapo": Case(
        "dapo",
        ("algorithm.overlong_buffer=1", "algorithm.overlong_penalty=0.02", "algorithm.max_generated_batches=2"),
        band=(48, 80),
    ),
    "remax": Case("remax", (*UNSCALED, "rollout.n=8"), band=(84, 95)),
    "tools": Case("grpo", band=(12, 18), task="tools"),
}


class _Configurable(Worker):
    """A worker that accepts another config while running: starting one takes longer than training the tiny model."""

    @register(Dispatch.ONE_TO_ALL)
    def configure(self, config: RunConfig) -> None:
        """Uses this config from now on; the rollout engine is kept."""
        self.config = config


class LearningActor(_Configurable, ActorRolloutRefWorker):
    """The policy's worker."""


class LearningCritic(_Configurable, CriticWorker):
    """The value model's worker."""


class LearningRoles(Roles):
    """One set of workers for many configs of the same model, with lengths up to those of the first config."""

    def __init__(self, config: RunConfig, model: Path) -> None:
        self.run = str(model)
        (placement,) = reserve(resource_pools(config), self.run, config.trainer.call_timeout_s)
        self.workers = start_groups(placement, [LearningActor, LearningCritic], config)
        for group in self.workers:
            group.meet()
        self.actor = self.workers[0]
        self.use(config)
        self.init_models(str(model), 1)

    def use(self, config: RunConfig) -> None:
        """Switches to another config; `init_models` must follow."""
        self.config = config
        self.trained = self.workers[: 1 + config.needs_critic]
        for group in self.trained:
            group.configure(config)


class _Learned(Exception):
    """Ends training before its last step."""


class Learner:
    """Trains cases one after another on the same workers."""

    roles: LearningRoles | None = None
    task: str

    def __init__(self, home: Path) -> None:
        """Ray must be running."""
        self.home, self.runs = home, 0

    def close(self) -> None:
        """Ends the workers."""
        if self.roles:
            self.roles.close()

    def config(self, case: Case, seed: int) -> RunConfig:
        """The task's config overridden by the case's recipe."""
        recipe = self.home / f"case-{self.runs}.yaml"
        recipe.write_text(f"defaults: [{case.task}, {case.recipe}]\n")
        return compose(str(recipe), [*case.settings, f"trainer.seed={seed}", "trainer.save_every=1000"]).config

    def steps(self, case: Case, seed: int) -> tuple[int | None, list[Metrics]]:
        """Number of steps until the target is reached (None if never), and the metrics of each step."""
        config, metrics = self.config(case, seed), list[Metrics]()

        def learned() -> bool:
            # Dynamic sampling excludes solved prompts from the step's score.
            last = [each.get("sampling/generated_score", each["score/mean"]) for each in metrics[-WINDOW:]]
            return len(last) == WINDOW and statistics.mean(last) >= TARGET

        class Watch(NullObserver):
            def on_step(self, record: dict[str, Any]) -> None:
                metrics.append(record["metrics"])
                if learned():
                    raise _Learned

        model, store = self._fresh_model(config), Store(str(self.home / f"run-{self.runs}"))
        tokenizer = load_tokenizer(model)
        data_hash = prepare_data(config, store, tokenizer)["data_hash"]
        rows = RLHFDataset.load(store, "train", tokenizer)
        roles = self._serve(config, case.task, model)
        if config.warm_start.steps:
            chat = chat_template(tokenizer, tool_schemas(config.agent), config.agent, stop_tokens(model))
            roles.init_warm_start(str(model))
            warm_start(config, rows, roles, tokenizer, store, chat, lambda step, loss: None)
            model = Path(store.url, run_files.WARM_START)
        trainer = PPOTrainer(config, store, tokenizer, rows, data_hash, roles, Watch())
        trainer.start(str(model))
        with suppress(_Learned):
            trainer.fit(config.trainer.steps)
        return len(metrics) if learned() else None, metrics

    def _serve(self, config: RunConfig, task: str, model: Path) -> LearningRoles:
        """The workers with this config; a task with another model shape gets new workers."""
        if self.roles and self.task != task:
            self.roles.close()
            self.roles = None
        if not self.roles:
            self.task, self.roles = task, LearningRoles(compose(task).config, model)
        self.roles.use(config)
        return self.roles

    def _fresh_model(self, config: RunConfig) -> Path:
        self.runs += 1
        folder = self.home / f"model-{self.runs}"
        save_tiny_model(folder, config.model.tiny, 64, config.trainer.seed)
        return folder


@contextmanager
def learner(home: Path) -> Iterator[Learner]:
    """A learner in its own Ray session."""
    with ray_session(home, 1, verbose=False):
        made = Learner(home)
        try:
            yield made
        finally:
            made.close()
