"""Small real runs without the flow: what their ledgers and rollouts hold, for tests of several pages."""

import itertools
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.cluster.resources import ray_session
from rl_core.cluster.roles import Roles
from rl_core.config.compose import compose
from rl_core.config.schema import RunConfig
from rl_core.data.dataset import RLHFDataset
from rl_core.data.prepare import prepare_data
from rl_core.data.protocol import DataProto
from rl_core.models.load import load_tokenizer
from rl_core.models.tiny import save_tiny_model
from rl_core.storage import run_files
from rl_core.storage.ledger import Ledger
from rl_core.storage.store import Store
from rl_core.trainer.observer import NullObserver, RunObserver
from rl_core.trainer.trainer import PPOTrainer

# Metrics that differ between runs that train the same.
MOVING = re.compile(r"^(time|perf)/|^reward/(seconds_mean|seconds_max|wait)$|^rollout/(engines|redispatched)$")
SMALL = [
    "data.source=sort_digits",
    "data.difficulty=3",
    "data.train_rows=32",
    "data.val_rows=8",
    "data.train_batch_size=4",
    "data.max_prompt_length=16",
    "data.max_response_length=8",
    "model.tiny.layers=1",
    "model.tiny.hidden_size=32",
    "actor.mini_batch_size=2",
    "actor.optim.lr=1e-3",
    "actor.max_tokens_per_micro_batch=256",
    "reward.function=support_rewards:length",
    "rollout.n=4",
    "rollout.max_num_seqs=32",
    "rollout.kv_cache_gb=0.0625",
]
# Together they switch on everything that has metrics of its own.
RUNS = {
    "grpo": ("grpo", ["trainer.steps=3", "actor.entropy_coef=0.01", "actor.ppo_epochs=2"]),
    "ppo": (
        "ppo",
        [
            "trainer.steps=2",
            "trainer.ranks_per_node=2",
            "algorithm.lam=0.9",
            "algorithm.kl_in_reward_coef=0.1",
            "algorithm.kl_controller=adaptive",
            "algorithm.kl_horizon=32",
            "algorithm.allow_both_kl=true",
            "algorithm.overlong_buffer=4",
            "algorithm.max_generated_batches=2",
            "algorithm.pf_ppo=max_random",
            "correction.weights=sequence",
            "correction.normalise=true",
            "correction.reject=token",
            # The mismatch is tiny: a part of the tokens lies just below 1.
            "correction.reject_bounds=[1.0, 2.0]",
            "actor.policy_loss=clip_cov",
            "actor.clip_cov_low=0.0",
            "actor.cov_ratio=0.2",
            "actor.kl_loss_coef=0.01",
            "actor.loss_agg_mode=seq-mean-token-sum",
            "reward.function=support_rewards:named",
        ],
    ),
    "lora": (
        "grpo",
        [
            "trainer.steps=2",
            "trainer.ranks_per_node=2",
            "model.lora.rank=2",
            "model.lora.push=adapter",
            "actor.kl_loss_coef=0.1",
        ],
    ),
    "async": (
        "grpo",
        ["trainer.steps=2", "rollout.mode=async", "rollout.ranks_per_node=1", "correction.weights=token"],
    ),
    # An untrained model calls nothing.
    "tools": (
        "grpo",
        [
            "trainer.steps=2",
            "agent.tools=[calculator]",
            "agent.parser=pythonic",
            "rollout.log_probs=false",
            "trainer.profile_steps=[2]",
            "actor.mini_batch_size=4",  # one update a step, which also gives the log-probs before it
        ],
    ),
}


@dataclass(frozen=True)
class Trained:
    """The small runs, by name, in `runs` of a home folder."""

    home: Path
    configs: dict[str, RunConfig]

    def store(self, name: str) -> Store:
        """A run's store."""
        return Store(str(self.home / "runs" / name))

    def records(self, name: str) -> list[dict[str, Any]]:
        """A run's ledger records."""
        files = sorted((self.home / "runs" / name / "ledger").glob("*.json"))
        return [self.store(name).read_json(f"ledger/{file.name}") for file in files]


def train_small_runs(home: Path, ray_home: Path) -> Trained:
    """Trains them, one after the other, in one Ray session."""
    configs = {name: compose(recipe, [*SMALL, *settings]).config for name, (recipe, settings) in RUNS.items()}
    trained = Trained(home, configs)
    with ray_session(ray_home, max(config.slots for config in configs.values()), False):
        for name, config in configs.items():
            with trainer_of(trained.store(name), config, home / "models" / name) as trainer:
                trainer.fit(config.trainer.steps)
    return trained


@contextmanager
def trainer_of(store: Store, config: RunConfig, model: Path) -> Iterator[PPOTrainer]:
    """A trainer at its start, with an offline model and everything that it needs; Ray must be running."""
    store.write_json("run.json", {"config": config.model_dump(mode="json")})
    with closing(Roles(config, store.url)) as roles:
        trainer = make_trainer(store, config, model, roles)
        trainer.start(str(model))
        yield trainer


def make_trainer(
    store: Store,
    config: RunConfig,
    model: Path,
    roles: Roles,
    observer: RunObserver | None = None,
) -> PPOTrainer:
    """A trainer that may be started, with its data prepared and the offline model in the folder `model`."""
    save_tiny_model(model, config.model.tiny, 24, config.trainer.seed)
    tokenizer = load_tokenizer(model)
    data_hash = prepare_data(config, store, tokenizer)["data_hash"]
    rows = RLHFDataset.load(store, "train", tokenizer)
    return PPOTrainer(config, store, tokenizer, rows, data_hash, roles, observer or NullObserver())


class Events(NullObserver):
    """Writes down steps and commits."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def on_step(self, record: dict[str, Any]) -> None:
        self.events.append(f"step {record['step']}")

    def on_commit(self, step: int) -> None:
        self.events.append(f"commit {step}")


class Bench:
    """One set of workers, for one run after the other."""

    def __init__(self, config: RunConfig, home: Path, roles: Roles) -> None:
        self.config, self.home, self.roles = config, home, roles

    def store(self, name: str) -> Store:
        return Store(str(self.home / name))

    def start(
        self, name: str, failure: tuple[int, Exception] | None = None, config: RunConfig | None = None
    ) -> tuple[PPOTrainer, list[str]]:
        """The started trainer of a run, with a config of its own if given, and what it does as it does it.

        It may fail when it has taken its rollouts for the n-th time.
        """
        events: list[str] = []
        trainer = make_trainer(self.store(name), config or self.config, self.home / "model", self.roles, Events(events))
        take, taken = trainer.queue.take, itertools.count(1)

        def watched(step: int, attempt: int = 0) -> tuple[DataProto, DataProto | None]:
            rollouts, number = take(step, attempt), next(taken)
            events.append(f"rollouts {number}")
            if failure and failure[0] == number:
                raise failure[1]
            return rollouts

        trainer.queue.take = watched  # type: ignore[method-assign]
        trainer.start(str(self.home / "model"))
        return trainer, events


def records(store: Store) -> list[dict[str, float]]:
    found = [record["metrics"] for record in Ledger(store).records(max(store.committed_steps(run_files.CHECKPOINTS)))]
    return [{name: value for name, value in metrics.items() if not MOVING.match(name)} for metrics in found]


def shards(store: Store, step: int) -> dict[str, str]:
    manifest = store.read_manifest(run_files.checkpoint(step))
    assert manifest is not None
    # The description beside the shards has an identity of its own for every save.
    return {file["path"]: file["sha256"] for file in manifest["files"] if file["path"].endswith(".distcp")}
