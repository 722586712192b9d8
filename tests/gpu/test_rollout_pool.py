"""An actor on one GPU and a rollout engine on another: weights go from one to the other over NCCL."""

import os
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from support import LENGTHS, rows_of, save_sharp_model

from rl_core.cluster.resources import ray_session
from rl_core.cluster.roles import Roles
from rl_core.config.compose import compose
from rl_core.data.protocol import DataProto

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
HOME = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parents[1]
SETTINGS = [
    "data.max_prompt_length=16",
    "data.max_response_length=40",
    "model.dtype=bfloat16",
    "actor.optim.lr=1e-2",
    "rollout.ranks_per_node=1",
    "rollout.mode=async",
    "rollout.gpu_memory_utilization=0.3",
    "rollout.canary_tolerance=0.2",
]


def test_pushes_over_nccl_change_what_is_served_while_turns_go_on(tmp_path: Path) -> None:
    save_sharp_model(tmp_path / "model")
    prompts = DataProto.from_dict({}, {"prompt_ids": [[4, 9, 7 + i] for i in range(32)], "seed": list(range(32))})
    with ray_session(HOME, 2, False), closing(Roles(compose("grpo", SETTINGS).config, "gpus")) as roles:
        roles.init_models(str(tmp_path / "model"), 100)
        roles.rollout.push_weights(0)
        before = roles.rollout.generate_sequences(prompts, 1.0)
        for _ in range(5):
            roles.actor.update_supervised(rows_of(LENGTHS))
        call = roles.rollout.submit(prompts, 1.0)
        start = time.monotonic()
        assert roles.rollout.push_weights(1) < 0.2
        assert time.monotonic() - start < 5
        assert set(call.get().batch["version"].flatten().tolist()) <= {-1, 0, 1}
        after = roles.rollout.generate_sequences(prompts, 1.0)
    assert set(after.batch["version"].flatten().tolist()) <= {-1, 1}
    assert not torch.equal(before.batch["responses"], after.batch["responses"])
