"""Training and rollouts in one process on one GPU: parity, memory that is handed over, and none that is lost."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import complete, policy_engine, single_turns, start_ranks, update_alone
from transformers import AutoModelForCausalLM

from benchmarks.train_step import SHAPE  # 0.49B parameters
from rl_core.config.schema import OptimConfig, RolloutConfig
from rl_core.data.protocol import DataProto
from rl_core.rollout.engine.protocol import RolloutEngine, Sampling
from rl_core.rollout.weights.weight_sync import ShardingManager
from rl_core.training.engine import TrainEngine
from rl_core.training.mesh import RankMesh

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
LENGTH, GB = 128, 1e9
# Largest difference of log-probs that bfloat16 makes between the two engines here.
BAND = 0.3
SAMPLING = Sampling(0.7, 64, ())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(SHAPE, dtype=torch.bfloat16).save_pretrained(folder)
    torch.cuda.empty_cache()
    return folder


@pytest.fixture(scope="module")
def rollout(model: Path, gpu: RankMesh) -> Iterator[RolloutEngine]:
    from rl_core.rollout.engine.vllm_engine import VLLMEngine

    settings = RolloutConfig(gpu_memory_utilization=0.25, max_num_seqs=128)
    engine = VLLMEngine(model, settings, "bfloat16", LENGTH, gpu.device)
    engine.sleep()
    yield engine
    engine._llm.llm_engine.engine_core.shutdown()


def prompts(count: int) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, SHAPE.vocab_size, (count, 16), generator=generator).tolist()
    return DataProto.from_dict({}, {"prompt_ids": ids, "seed": list(range(count))})


def ready(batch: DataProto, engine: TrainEngine) -> DataProto:
    """The rollouts with what the policy loss needs."""
    old_BR = engine.compute(batch, SAMPLING.temperature)[0]
    advantages_BR = torch.randn(old_BR.shape, generator=torch.Generator().manual_seed(1))
    return batch.union(DataProto({"old_log_probs": old_BR, "advantages": advantages_BR}))


def used() -> float:
    """GB of the card that are taken, by whomever."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GB


def test_fifty_steps_of_training_and_rollouts_need_no_more_memory(
    model: Path, gpu: RankMesh, rollout: RolloutEngine
) -> None:
    """Training and rollouts of 0.49B parameters share a card of 80 GB: never more than that at once, never growing."""
    engine = policy_engine(model, gpu, OptimConfig(lr=1e-5), 8192, 50, dtype="bfloat16")
    sharding = ShardingManager(engine, rollout, "bfloat16", BAND, LENGTH)
    peaks, asleep = [], []
    for step in range(50):
        sharding.push(step)
        batch = single_turns(rollout, prompts(64), SAMPLING)
        assert batch.batch["version"].unique().tolist() == [step]
        peaks.append(used())
        rollout.sleep()
        freed = peaks[-1] - used()
        rows = ready(batch, engine)
        if step == 0:
            difference_BR = (rows.batch["old_log_probs"] - rows.batch["rollout_log_probs"]).abs()
            print(f"log-probs differ by {difference_BR.mean():.4f} on average, {difference_BR.max():.4f} at most")
            assert difference_BR.mean() < BAND / 10 and difference_BR.max() < BAND
        update_alone(engine, rows)
        asleep.append(used())
    print(f"GB: rolling out {peaks[0]:.1f} → {peaks[-1]:.1f}, training {asleep[0]:.1f} → {asleep[-1]:.1f}")
    assert max(peaks + asleep) < 80
    assert peaks[-1] < peaks[5] + 0.1 and asleep[-1] < asleep[5] + 0.1
    assert freed > 25, "the engine's memory is not given to training"


def test_requests_that_are_interrupted_by_a_push_go_on(model: Path, gpu: RankMesh, rollout: RolloutEngine) -> None:
    engine = policy_engine(model, gpu, dtype="bfloat16")
    ShardingManager(engine, rollout, "bfloat16", BAND, LENGTH).push(3)
    turns = complete(rollout, prompts(8).non_tensor_batch["prompt_ids"].tolist(), list(range(8)), SAMPLING)
    assert {version for turn in turns for version in turn.versions} == {3}
    assert all(len(turn.token_ids) == 64 for turn in turns)
    rollout.sleep()


def test_adapters_alone_are_pushed(model: Path) -> None:
    """In a process of its own: vLLM hands memory over in one engine a process."""
    start_ranks(Path(__file__).parent / "adapters.py", 1, model)
