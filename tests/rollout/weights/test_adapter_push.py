"""Pushes of a policy with adapters into the live engine, merged and as adapters, in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import LENGTHS, off_policy, plain_log_probs, policy_engine, rows_of, single_turns, update_alone
from torch import Tensor

from rl_core.config.schema import LoraConfig, OptimConfig
from rl_core.data.protocol import DataProto
from rl_core.errors import TrainingError
from rl_core.rollout.engine.protocol import RolloutEngine, Sampling
from rl_core.rollout.weights import weight_sync as sharding_manager
from rl_core.rollout.weights.weight_sync import ShardingManager
from rl_core.training.mesh import RankMesh

ENGINES = ("vllm", "transformers")
TOLERANCE = 1e-5
PROMPTS = [[4, 8, 9, 10, 2, 5], [4, 30, 2, 5], [40]]
FIXED = [7, 8, 20, 21, 60, 3, 44, 9, 9, 1, 33, 50]
FREE = Sampling(1.0, 8, ())


class Trainer:
    """A policy with adapters, and the sharding manager that pushes it."""

    def __init__(self, model: Path, rank_mesh: RankMesh, rollout: RolloutEngine, as_adapter: bool) -> None:
        self.rollout = rollout
        self.engine = policy_engine(model, rank_mesh, OptimConfig(lr=3e-2), lora=LoraConfig(rank=4, alpha=8))
        self.sharding = ShardingManager(self.engine, rollout, "float32", TOLERANCE, 64, as_adapter)

    def train(self) -> None:
        update_alone(self.engine, off_policy(self.engine, rows_of(LENGTHS)))

    def served(self) -> Tensor:
        """The live engine's log-probs of fixed tokens."""
        return torch.tensor(self.rollout.log_probs(FIXED))

    def check_samples(self, version: int) -> None:
        """What the live engine samples is of the version, and as likely as the trained policy says."""
        columns: dict[str, Any] = {"prompt_ids": PROMPTS * 4, "seed": list(range(12))}
        batch = single_turns(self.rollout, DataProto.from_dict({}, columns), FREE)
        assert batch.batch["version"].tolist() == [[version] * 8] * 12
        wanted_BR = self.engine.compute(batch, 1.0)[0]
        torch.testing.assert_close(batch.batch["rollout_log_probs"], wanted_BR, rtol=0, atol=TOLERANCE)


@pytest.fixture(params=[f"{engine}_{kind}" for engine in ENGINES for kind in ("engine", "adapter_engine")])
def trainer(request: pytest.FixtureRequest, tiny_model: Path, rank_mesh: RankMesh) -> Trainer:
    """Pushes merged weights, or adapters, to each engine."""
    return Trainer(tiny_model, rank_mesh, request.getfixturevalue(request.param), "adapter" in request.param)


def test_the_engine_serves_the_trained_policy(trainer: Trainer, tiny_model: Path) -> None:
    base = plain_log_probs(tiny_model, FIXED[:1], FIXED[1:])
    assert trainer.sharding.push(3) < TOLERANCE
    torch.testing.assert_close(trainer.served(), base, rtol=0, atol=TOLERANCE)
    trainer.check_samples(3)
    before = base
    for version in (4, 5):
        trainer.train()
        trainer.rollout.sleep()
        assert trainer.sharding.push(version) < TOLERANCE
        assert (trainer.served() - before).abs().max() > 0.1
        before = trainer.served()
        trainer.check_samples(version)


def test_a_policy_that_was_trained_before_the_first_push(trainer: Trainer, tiny_model: Path) -> None:
    """As after a resume: what the adapters add is there once, not twice."""
    trainer.train()
    trainer.train()
    assert trainer.sharding.push(2) < TOLERANCE
    assert (trainer.served() - plain_log_probs(tiny_model, FIXED[:1], FIXED[1:])).abs().max() > 0.1
    trainer.check_samples(2)


def test_after_the_first_push_only_adapters_go(
    tiny_model: Path,
    rank_mesh: RankMesh,
    adapter_engine: RolloutEngine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    trainer = Trainer(tiny_model, rank_mesh, adapter_engine, True)
    monkeypatch.setattr(sharding_manager, "SHARED_MEMORY", tmp_path)
    pushed: list[int] = []
    monkeypatch.setattr(adapter_engine, "update_weights", lambda weights, version: pushed.append(len(list(weights))))
    trainer.sharding.push(0)
    trainer.train()
    trainer.sharding.push(1)
    assert len(pushed) == 1 and list(tmp_path.iterdir()) == []
    if hasattr(adapter_engine, "_llm"):
        assert len(adapter_engine._llm.llm_engine.list_loras()) == 1


def test_adapters_that_were_changed_on_the_way_are_caught(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.train()
    trainer.train()
    right, whole = trainer.engine.adapter_parameters, trainer.engine.full_parameters
    monkeypatch.setattr(trainer.engine, "adapter_parameters", lambda: ((n, t * 1.2) for n, t in right()))
    monkeypatch.setattr(trainer.engine, "full_parameters", lambda merged: whole(merged=False))
    with pytest.raises(TrainingError, match="push of weights version 1.*canary_tolerance"):
        trainer.sharding.push(1)


def test_a_cached_prompt_is_computed_anew_after_a_push(trainer: Trainer) -> None:
    prompt = torch.randint(3, 64, (50,), generator=torch.Generator().manual_seed(5)).tolist()  # longer than a block
    columns: dict[str, Any] = {"prompt_ids": [prompt] * 2, "seed": [1, 2]}
    for version in (1, 2):
        trainer.sharding.push(version)
        batch = single_turns(trainer.rollout, DataProto.from_dict({}, columns), FREE)
        wanted_BR = trainer.engine.compute(batch, 1.0)[0]
        torch.testing.assert_close(batch.batch["rollout_log_probs"], wanted_BR, rtol=0, atol=TOLERANCE)
        trainer.train()
