"""What a trainer gives its workers and restores at the start, with roles that compute nothing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support_training import make_trainer

from rl_core.cluster.roles import Roles
from rl_core.config.compose import compose
from rl_core.config.updates import actor_updates, critic_updates, mini_batches
from rl_core.storage.store import Store

SMALL = ["data.train_rows=16", "data.val_rows=4", "data.max_prompt_length=12", "data.max_response_length=12"]
SIZES = ["trainer.steps=5", "data.train_batch_size=8", "actor.mini_batch_size=4"]


def test_the_learning_rate_schedule_counts_every_optimizer_step() -> None:
    config = compose("ppo", [*SIZES, "actor.ppo_epochs=3", "critic.ppo_epochs=4"]).config
    given: dict[str, tuple[Any, ...]] = {}

    def group(name: str) -> SimpleNamespace:
        def submit(*args: Any) -> SimpleNamespace:
            given[name] = args
            return SimpleNamespace(get=lambda: None)

        return SimpleNamespace(init_model=SimpleNamespace(submit=submit))

    roles: Any = SimpleNamespace(
        config=config, actor=group("actor"), critic=group("critic"), pool=None, reward_model=None
    )
    Roles.init_models(roles, "folder", mini_batches(config))
    assert given["actor"] == ("folder", config.actor.optim, 5 * 2 * 3, True)
    assert given["critic"] == ("folder", config.critic.optim, 5 * 2 * 4)
    assert (actor_updates(config), critic_updates(config)) == (30, 40)


class Files:
    """Roles that write an empty file as their state."""

    def __init__(self) -> None:
        self.pushed: list[int] = []
        self.rollout = SimpleNamespace(push_weights=self.pushed.append)
        self.model_scores = None

    def init_models(self, path: str, updates: int) -> None:
        self.updates = updates

    def save_checkpoint(self, store: Store, folder: str) -> None:
        self.entry = store.add_bytes(b"", folder, "state")

    def finish_checkpoint(self) -> list[Any]:
        return [self.entry]

    def load_checkpoint(self, store: Store, folder: str) -> None:
        assert store.exists(f"{folder}/state")


@pytest.mark.parametrize("coefficient", [0.0123, 0.0])
def test_a_resumed_trainer_has_the_step_the_position_and_the_kl_coefficient(tmp_path: Path, coefficient: float) -> None:
    kl = ["algorithm.kl_in_reward_coef=0.5", "algorithm.kl_controller=adaptive", "actor.kl_loss_coef=0"]
    config = compose("grpo", [*SIZES, *SMALL, *kl]).config

    def trainer() -> Any:
        roles: Any = Files()
        made = make_trainer(Store(str(tmp_path / "run")), config, tmp_path / "model", roles)
        made.start(str(tmp_path / "model"))
        return made

    first = trainer()
    assert (first.step, first.kl_controller.coef, first.roles.updates) == (0, 0.5, 10)
    first.queue.loader.next()
    first.kl_controller.coef = coefficient
    first.checkpointer.begin(3, first._meta(3))
    first.checkpointer.finish()
    resumed = trainer()
    assert (resumed.step, resumed.kl_controller.coef, resumed.roles.pushed) == (3, coefficient, [3])
    assert resumed.queue.loader.next() == first.queue.loader.next()
