"""The trainer's loop over each rollout engine, with real workers, in float32."""

import io
import os
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray
from safetensors.torch import load_file
from support import distance
from support_training import SMALL, Bench

from rl_core.cluster.resources import ray_session
from rl_core.cluster.roles import Roles
from rl_core.config.compose import compose
from rl_core.storage import run_files

STEPS = 3
# The engines draw from one distribution, but with other random numbers: only the most likely token is one for both.
SETTINGS = [
    *SMALL,
    "reward.function=support_rewards:letters",
    "rollout.top_k=1",
    "rollout.n=1",
    "data.train_batch_size=16",
    "actor.mini_batch_size=8",
    "actor.optim.lr=1e-2",
    "algorithm.estimator=reinforce_plus_plus",
    f"trainer.steps={STEPS}",
]


def test_both_engines_train_the_same_weights(tmp_path: Path) -> None:
    """And only the workers of vLLM import it."""
    responses, ends = [], []
    with ray_session(Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parents[1], 1, False):
        for engine in ("auto", "vllm"):
            config = compose("grpo", [*SETTINGS, f"rollout.engine={engine}"]).config
            roles = Roles(config, engine)
            bench = Bench(config, tmp_path, roles)
            trainer, _ = bench.start(engine)
            trainer.fit(STEPS)
            store = bench.store(engine)
            roles.actor.export(store, "export")
            ends.append(load_file(Path(store.root, "export", "model.safetensors")))
            tables = [pq.read_table(io.BytesIO(store.read_bytes(run_files.rollouts(i + 1)))) for i in range(STEPS)]
            responses.append([row for table in tables for row in table.column("responses").to_pylist()])
            loaded = roles.actor.workers[0].__ray_call__.remote(lambda self: "vllm" in sys.modules)
            assert ray.get(loaded) == (engine == "vllm")
            roles.close()
    assert responses[0] == responses[1]
    moved, apart = distance(ends[0], load_file(tmp_path / "model" / "model.safetensors")), distance(ends[0], ends[1])
    assert moved > 1e-2 and apart < 1e-5, (moved, apart)
    worst = max((ends[0][name] - ends[1][name]).abs().max().item() for name in ends[0])
    assert worst < compose("grpo", []).config.rollout.canary_tolerance
    assert worst == pytest.approx(0, abs=1e-4)
