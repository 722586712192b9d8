"""An actor on one GPU and a rollout engine on another: weights go from one to the other over NCCL."""

import os
import signal
import time
from contextlib import closing
from pathlib import Path
from threading import Timer

import pytest
import ray
import torch
from support import LENGTHS, rows_of, save_sharp_model

from rl_core.cluster.resources import ray_session
from rl_core.cluster.roles import Roles
from rl_core.config.compose import compose
from rl_core.data.protocol import DataProto
from rl_core.errors import TransientError

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


def prompts() -> DataProto:
    return DataProto.from_dict({}, {"prompt_ids": [[4, 9, 7 + i] for i in range(32)], "seed": list(range(32))})


def start(roles: Roles, model: Path) -> None:
    """The policy at the saved weights, served as version 0."""
    roles.init_models(str(model), 100)
    assert roles.rollout.push_weights(0) < 0.2


def test_pushes_over_nccl_change_what_is_served_while_turns_go_on(tmp_path: Path) -> None:
    save_sharp_model(tmp_path / "model")
    with ray_session(HOME, 2, False), closing(Roles(compose("grpo", SETTINGS).config, "gpus")) as roles:
        start(roles, tmp_path / "model")
        before = roles.rollout.generate_sequences(prompts(), 1.0)
        for _ in range(5):
            roles.actor.update_supervised(rows_of(LENGTHS))
        call = roles.rollout.submit(prompts(), 1.0)
        began = time.monotonic()
        assert roles.rollout.push_weights(1) < 0.2
        assert time.monotonic() - began < 5
        assert set(call.get().batch["version"].flatten().tolist()) <= {-1, 0, 1}
        after = roles.rollout.generate_sequences(prompts(), 1.0)
    assert set(after.batch["version"].flatten().tolist()) <= {-1, 1}
    assert not torch.equal(before.batch["responses"], after.batch["responses"])


def test_a_killed_engine_ends_the_attempt_soon_and_fresh_workers_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only engine is killed during rollouts, then another during a broadcast, when the actor waits in NCCL."""
    save_sharp_model(tmp_path / "model")
    config = compose("grpo", SETTINGS).config
    with ray_session(HOME, 2, False):
        for moment in ("rollouts", "push", "never"):
            with closing(Roles(config, "gpus")) as roles:
                start(roles, tmp_path / "model")
                pool = roles.pool
                assert pool
                group = pool._engines[0].group
                process: int = ray.get(group.workers[0].__ray_call__.remote(lambda self: os.getpid()))
                broadcast, began = pool._broadcast, time.monotonic()

                def stop_then_broadcast(version: int) -> None:
                    os.kill(process, signal.SIGSTOP)  # noqa: B023 - called in this round
                    Timer(2, os.kill, (process, signal.SIGKILL)).start()  # noqa: B023
                    broadcast(version)  # noqa: B023

                if moment == "rollouts":
                    call = pool.submit(prompts(), 1.0)
                    os.kill(process, signal.SIGKILL)
                    with pytest.raises(TransientError, match="no rollout engine is left"):
                        call.get()
                elif moment == "push":
                    monkeypatch.setattr(pool, "_broadcast", stop_then_broadcast)
                    with pytest.raises(TransientError, match="was lost during"):
                        pool.push_weights(1)
                else:
                    assert pool.push_weights(1) < 0.2
                    assert len(pool.generate_sequences(prompts(), 1.0)) == 32
                assert time.monotonic() - began < 30
