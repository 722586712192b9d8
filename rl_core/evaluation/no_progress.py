"""Signs that training changed nothing, for warnings of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

FLAT_STEPS = 10
"""Steps in a row without different rewards after which a run warns."""

Metrics = Mapping[str, float]


def is_flat(metrics: Metrics) -> bool:
    """Whether no group of a step has responses with different scores; single responses are compared with all others."""
    if metrics.get("group/alone_share") == 1.0:
        return metrics.get("score/max", 0.0) == metrics.get("score/min", 0.0)
    return metrics.get("group/equal_share") == 1.0


def flat_warning(steps: int, metrics: Metrics) -> str:
    """Warning after a number of flat steps, of which the last has these metrics."""
    return (
        f"no rewards differed within the responses to a prompt for {steps} steps (mean score "
        f"{metrics.get('score/mean', 0.0):.3f}): nothing is learned from them; check the scorer, and whether the rows "
        "are too easy or too hard"
    )


def is_suspect(steps: int, last: Metrics) -> bool:
    """Whether `training_warnings` may find something in a run of this many steps, given the metrics of the last."""
    return steps < FLAT_STEPS or last.get("actor/grad_norm") == 0.0


def training_warnings(records: Sequence[Metrics], steps: int) -> list[str]:
    """Warnings about all steps of a run, given their metrics or, in a long run, those of steps sampled from them."""
    found = []
    if records and len(records) < FLAT_STEPS and all(map(is_flat, records)):
        found.append(flat_warning(len(records), records[-1]))
    if records and all(metrics.get("actor/grad_norm") == 0.0 for metrics in records):
        counted = f"{steps} steps" if len(records) == steps else f"{len(records)} steps sampled from {steps}"
        found.append(f"the weights did not change: every gradient of {counted} was 0")
    return found


def score_warnings(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Warnings about the scores before and after training."""
    names = ("greedy", "sampled")
    if any(before[name] != after[name] for name in names):
        return []
    scores = ", ".join(f"{name} {before[name]:.3f} → {after[name]:.3f}" for name in names)
    return [f"the scores did not move: {scores}"]
