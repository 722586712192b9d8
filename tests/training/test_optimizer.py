import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.config.schema import OptimConfig
from rl_core.training.optimizer import build_optimizer, learning_rate

SCHEDULES = st.sampled_from(["constant", "linear", "cosine"])


@pytest.mark.parametrize(
    ("schedule", "warmup", "shape"),
    [
        ("constant", 0, [1, 1, 1, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25, 0]),
        ("cosine", 0, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]),
        ("constant", 2, [0.5, 1, 1, 1, 1]),
        ("linear", 2, [0.5, 1, 1, 0.5, 0]),
    ],
)
def test_shapes_of_the_schedule(schedule: str, warmup: int, shape: list[float]) -> None:
    config = OptimConfig(lr=3e-4, lr_schedule=schedule, warmup_steps=warmup)
    rates = [learning_rate(config, update, 4) for update in range(5)]
    assert rates == pytest.approx([3e-4 * part for part in shape], abs=1e-12)


@given(SCHEDULES, st.integers(0, 10), st.integers(1, 30), st.integers(0, 60))
def test_rates_stay_between_zero_and_the_peak(schedule: str, warmup: int, total: int, update: int) -> None:
    config = OptimConfig(lr=1e-3, lr_schedule=schedule, warmup_steps=warmup)
    rate, following = (learning_rate(config, update + k, total) for k in range(2))
    assert 0 <= rate <= config.lr
    assert following >= rate if update + 1 < warmup else following <= rate
    assert rate > 0 or update >= total


def test_the_optimizer_is_adamw_as_configured() -> None:
    module = torch.nn.Linear(2, 1)
    optimizer = build_optimizer(module, OptimConfig(lr=0.1, betas=(0.5, 0.6), weight_decay=0.5))
    before = module.weight.detach().clone()
    module(torch.tensor([1.0, -1.0])).backward()
    optimizer.step()
    # AdamW's first step: the decoupled decay, then the rate against the gradient's sign.
    wanted = before * (1 - 0.1 * 0.5) - 0.1 * torch.tensor([1.0, -1.0])
    torch.testing.assert_close(module.weight.detach(), wanted)
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.6)
