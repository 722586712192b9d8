"""Training that changed nothing is noticed."""

import re

import pytest

from rl_core.evaluation.no_progress import FLAT_STEPS, is_flat, is_suspect, score_warnings, training_warnings

FLAT = {"group/equal_share": 1.0, "group/alone_share": 0.0, "score/mean": 0.0, "score/min": 0.0, "score/max": 0.0}
GOOD = FLAT | {"group/equal_share": 0.5, "score/max": 1.0, "actor/grad_norm": 0.1}


@pytest.mark.parametrize(
    ("metrics", "flat"),
    [
        (FLAT, True),
        (GOOD, False),
        (FLAT | {"score/max": 1.0}, True),  # prompts differ, the responses to each do not
        (FLAT | {"group/alone_share": 1.0, "score/max": 1.0}, False),  # one response per prompt, as with a critic
        (FLAT | {"group/alone_share": 1.0}, True),
    ],
)
def test_a_step_is_flat_without_different_scores_to_learn_from(metrics: dict[str, float], flat: bool) -> None:
    assert is_flat(metrics) is flat


def test_short_runs_of_flat_steps_and_of_zero_gradients_are_warned_of() -> None:
    assert training_warnings([], 0) == training_warnings([GOOD, FLAT], 2) == training_warnings([FLAT] * 10, 10) == []
    assert re.search("no rewards differed.* 3 steps", training_warnings([FLAT] * 3, 3)[0])
    still = FLAT | {"actor/grad_norm": 0.0}
    assert training_warnings([still] * 12, 12) == ["the weights did not change: every gradient of 12 steps was 0"]
    assert "of 12 steps sampled from 40 was 0" in training_warnings([still] * 12, 40)[0]
    assert training_warnings([still, GOOD], 2) == []
    assert is_suspect(FLAT_STEPS - 1, GOOD) and is_suspect(12, still) and not is_suspect(12, GOOD)


def test_scores_that_did_not_move_are_warned_of() -> None:
    zero = {"greedy": 0.0, "sampled": 0.0}
    assert score_warnings(zero, zero) == ["the scores did not move: greedy 0.000 → 0.000, sampled 0.000 → 0.000"]
    assert score_warnings(zero, zero | {"sampled": 0.001}) == []
