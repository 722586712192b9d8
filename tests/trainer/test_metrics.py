import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl_core.algorithms.correction import mismatch_metrics
from rl_core.data.protocol import DataProto
from rl_core.trainer.metrics import Phases, batch_metrics, mismatch, spread, value_metrics


def batch(mask_BR: torch.Tensor, scored: list[bool], groups: list[str]) -> DataProto:
    rows, width = mask_BR.shape
    return DataProto(
        {
            "response_mask": mask_BR,
            "scored": torch.tensor(scored),
            "token_level_scores": torch.arange(rows).float()[:, None] * torch.eye(1, width),
            "token_level_rewards": torch.arange(rows).float()[:, None] * torch.eye(1, width) - 0.25,
            "response_length": torch.full((rows,), width),
            "prompt_length": torch.arange(rows) + 2,
            "advantages": torch.ones(rows, width) * torch.arange(rows)[:, None] * mask_BR,
            "old_log_probs": torch.full((rows, width), -1.0),
            "rollout_log_probs": torch.full((rows, width), -1.5),
            "score_seconds": torch.arange(rows) / 2,
            "score_wait": torch.arange(rows) / 4,
        },
        {
            "stop_reason": np.array(["stop", "length"] * (rows // 2), dtype=object),
            "uid": np.array(groups, dtype=object),
            "score_status": np.array(["ok", "unreadable"] * (rows // 2), dtype=object),
        },
    )


def test_a_step_in_numbers() -> None:
    mask_BR = torch.ones(4, 3)
    mask_BR[3] = 0
    rows = batch(mask_BR, [True, True, True, False], ["a", "a", "b", "c"])
    metrics = batch_metrics(rows, False) | mismatch(rows)
    assert metrics["score/mean"] == 1.0 and metrics["score/max"] == 2.0 and metrics["score/min"] == 0.0
    assert metrics["reward/mean"] == 0.25 and metrics["reward/max"] == 1.25 and metrics["reward/min"] == -0.75
    assert metrics["reward/failed_share"] == 0.25 and metrics["reward/unreadable_share"] == 0.5
    assert metrics["reward/seconds_mean"] == metrics["reward/wait"] == 0.75 and metrics["reward/seconds_max"] == 1.5
    assert metrics["group/equal_share"] == metrics["group/alone_share"] == pytest.approx(2 / 3)
    assert metrics["group/std_mean"] == pytest.approx(math.sqrt(0.5) / 3)
    assert metrics["response_length/mean"] == 3.0 and metrics["prompt_length/max"] == 5.0
    assert metrics["response_length/truncated_share"] == 0.5
    assert metrics["advantage/mean"] == 1.0 and metrics["advantage/max"] == 2.0
    assert metrics["kl/rollout_max_difference"] == 0.5
    assert metrics["kl/rollout_k1"] == -0.5
    assert metrics["kl/rollout_k3"] == pytest.approx(math.exp(0.5) - 1 - 0.5)


def test_the_mismatch_looks_at_the_policys_tokens_only() -> None:
    old_BR, rollout_BR = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -9.0]])
    metrics = mismatch_metrics(old_BR, rollout_BR, torch.tensor([[1.0, 0.0]]))
    assert metrics.pop("effective_sample_size") == 1.0
    assert set(metrics.values()) == {0.0}


def test_nothing_is_nan_when_no_response_counts() -> None:
    empty_BR = torch.zeros(4, 3)
    rows = batch(empty_BR, [False] * 4, ["a", "b", "c", "d"])
    metrics = batch_metrics(rows, False) | mismatch(rows)
    metrics |= value_metrics(torch.ones(4, 3), torch.ones(4, 3), empty_BR)
    metrics |= Phases().metrics(0.0)
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    assert metrics["reward/failed_share"] == 1.0 and "reward/mean" not in metrics and "score/mean" not in metrics


def test_explained_variance() -> None:
    returns_BR, mask_BR = torch.tensor([[1.0, 3.0, 99.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    assert value_metrics(returns_BR, returns_BR, mask_BR)["critic/explained_variance"] == 1.0
    useless = value_metrics(torch.zeros(1, 3), returns_BR, mask_BR)
    assert useless == {"critic/explained_variance": 0.0, "critic/return_mean": 2.0}
    half_BR = torch.tensor([[0.5, 1.5, 0.0]])
    assert value_metrics(half_BR, returns_BR, mask_BR)["critic/explained_variance"] == pytest.approx(0.75)
    assert value_metrics(half_BR, torch.ones(1, 3), mask_BR)["critic/explained_variance"] == 0.0


def test_spread_of_nothing_is_nothing() -> None:
    assert spread("x", torch.tensor([1.0, 2.0, 6.0])) == {"x/mean": 3.0, "x/max": 6.0, "x/min": 1.0}
    assert spread("x", torch.tensor([])) == {}


def test_phases_add_up_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("rl_core.trainer.metrics.time", SimpleNamespace(perf_counter=lambda: now))
    phase = Phases()
    for name, seconds in (("a", 0.02), ("b", 0.01), ("a", 0.02)):
        with phase(name):
            now += seconds
    metrics = phase.metrics(100.0)
    assert metrics["time/a"] == pytest.approx(0.04) and metrics["time/b"] == pytest.approx(0.01)
    assert metrics["time/step"] == pytest.approx(0.05)
    assert metrics["perf/tokens_per_s"] == pytest.approx(100 / metrics["time/step"])
