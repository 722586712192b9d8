"""Rollouts of a step made by hand: a single turn, a calculator that is asked, and two that failed."""

import json
from typing import Any

import torch

from rl_core.data.protocol import DataProto
from rl_core.models.tiny import build_tokenizer
from rl_core.rollout.engine.protocol import Completion
from rl_core.rollout.trajectory import Trajectory, TrajectoryState, to_batch
from rl_core.trainer.rollout_file import rollout_parquet

TOKENIZER = build_tokenizer()
# What models write as JSON: a lone surrogate and no number.
ARGUMENTS = json.loads('{"expression": "6*7\\ud800", "scale": NaN}')
ANSWER = "<|tool|>42<|end|><|assistant|>"
SCORED = [True, True, False, False]


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text))


def call(turn: int, name: str, status: str = "ok", **others: Any) -> dict[str, Any]:
    return {
        "turn": turn, "name": name, "arguments": {}, "status": status, "text": "42", "seconds": 0.25, "detail": "",
        **others,
    }  # fmt: skip


def sample(trajectory: Trajectory, text: str, log_prob: float, version: int) -> None:
    tokens = ids(text)
    before = trajectory.prompt_ids + trajectory.response_ids
    trajectory.take(Completion(before, tokens, [log_prob] * len(tokens), [version] * len(tokens), "stop"))


def made() -> list[Trajectory]:
    prompt = ids("<|user|>6*7<|end|><|assistant|>")
    single, asked, late, refused = (Trajectory(prompt, seed, state=TrajectoryState.COMPLETED) for seed in range(4))
    sample(single, "41<|end|>", -0.5, 3)
    sample(asked, "{6*7}<|end|>", -1.0, 3)
    asked.append(ids(ANSWER))
    asked.calls = [
        call(1, "calculator", arguments=ARGUMENTS),
        call(1, "search", "timeout", seconds=2.0, detail="no answer within 2 s"),
    ]
    sample(asked, "42<|end|>", -0.25, 4)
    asked.reward = 0.5
    sample(late, "{?}<|end|>", -2.0, 3)
    late.append(ids(ANSWER))
    late.fail("timeout", "the conversation exceeded agent.timeout_s=1 s")
    refused.fail("prompt_length", "too long")
    return [single, asked, late, refused]


def step_parquet() -> bytes:
    """The four trajectories as a step writes them; scores 0 and 1, then two without one."""
    batch = to_batch(made(), 32)
    rewards = torch.zeros_like(batch.batch["response_mask"])
    rewards[1, batch.batch["response_length"][1] - 1] = 1.0
    scored = torch.tensor(SCORED)
    mask = batch.batch["response_mask"] * scored[:, None]
    added = {
        "old_log_probs": batch.batch.pop("rollout_log_probs"),
        "token_level_scores": rewards,
        "token_level_shaped": rewards,
        "token_level_rewards": rewards - 0.125 * mask,
        "advantages": torch.tensor([-1.0, 1.0, 0.0, 0.0])[:, None] * mask,
        "scored": scored,
        "reward_named/format": torch.tensor([1.0, 0.0, 0.0, 0.0]),
    }
    others: dict[str, list[Any]] = {
        "uid": [f"1-0-{place // 2}" for place in range(4)],
        "seed": [0] * 4,
        "row": [{"extra_info": {"index": 10 + place}, "data_source": "numeric"} for place in range(4)],
        "score_status": ["ok" if scored else "error" for scored in SCORED],
        "score_detail": [""] * 4,
    }
    batch = DataProto({**batch.batch, "response_mask": mask}, batch.non_tensor_batch)
    return rollout_parquet(batch.union(DataProto.from_dict(added, others)))
