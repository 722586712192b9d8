"""Settings of the evaluation on held-out rows and of the gate that decides whether a version becomes champion."""

import re
from typing import Literal

from pydantic import Field

from rl_core.config.learning import MAX_VALUE, Section


class EvaluationConfig(Section):
    """Evaluation on the held-out rows."""

    sampled_n: int = Field(4, ge=1, le=1_000_000)
    """Sampled responses per held-out prompt."""
    temperature: float = Field(1.0, ge=0.01, le=100.0)
    """Sampling temperature of the sampled score."""
    refusal_pattern: str = r"(?i)\b(I cannot|I can't|I am unable|I'm unable|as an AI)\b"
    """Regular expression; a greedy answer that contains a match counts as a refusal."""


class GateConfig(Section):
    """Conditions for moving the alias `champion`; champion and candidate are scored on the same rows and seeds."""

    mode: Literal["off", "dry_run", "enforce"] = "enforce"
    """off: versions are registered and only the alias `candidate` moves. dry_run: decides and reports, but moves
    nothing. enforce: moves the alias `champion` if all checks pass."""
    approval: bool = False
    """A version that passes waits for `rollforward promote VERSION --approve` instead of becoming champion at once."""
    metric: Literal["greedy", "sampled"] = "greedy"
    """Score compared: that of the greedy answer, or the mean over `evaluation.sampled_n` sampled ones."""
    alpha: float = Field(0.05, gt=0, lt=0.5)
    """Significance level: maximum share of promotions among versions that are no better than the champion."""
    min_effect: float = Field(0.0, ge=0, le=MAX_VALUE)
    """Minimum gain in score: the lower bound of the difference's confidence interval must exceed it."""
    min_score: float | None = Field(None, ge=-MAX_VALUE, le=MAX_VALUE)
    """Minimum score of a champion. Unset: none for a version that beats a champion; the first version must exceed the
    best constant answer, or waits for approval."""
    max_length_ratio: float | None = Field(2.0, gt=1, le=MAX_VALUE)
    """Maximum ratio of mean greedy-answer length (tokens) to the champion's; null disables the check."""
    max_format_drop: float | None = Field(0.05, gt=0, le=1)
    """Maximum drop in the share of greedy answers that end before the length limit; null disables the check."""
    max_refusal_rise: float | None = Field(0.05, gt=0, le=1)
    """Maximum rise in the share of greedy answers that are refusals; null disables the check."""
    max_source_drop: float | None = Field(0.1, gt=0, le=MAX_VALUE)
    """Maximum drop in score on any single data source if there are several; null disables the check."""
    max_kl: float | None = Field(None, gt=0, le=MAX_VALUE)
    """Maximum `kl/ref` (nats per token), mean of the last 10 steps; null disables the check."""
    min_entropy: float | None = Field(None, gt=0, le=MAX_VALUE)
    """Minimum `actor/entropy` (nats per token), mean of the last 10 steps; null disables the check."""
    max_mismatch: float | None = Field(None, gt=0, le=MAX_VALUE)
    """Maximum `kl/rollout_k3` (rollout engine against trainer), mean of the last 10 steps; null disables the check."""
    reload: bool = True
    """Load the registered version in a fresh process and compare its log-probs with the trainer's."""
    reload_tolerance: float | None = Field(None, gt=0, le=MAX_VALUE)
    """Maximum absolute difference of log-probs after a reload; unset: the limit of the canary after a
    weight push."""


def gate_checks(evaluation: EvaluationConfig, gate: GateConfig, has_reference: bool) -> list[tuple[object, str]]:
    """Checks of the gate settings: (condition, message if it fails)."""
    return [
        (
            _is_pattern(evaluation.refusal_pattern),
            f"evaluation.refusal_pattern={evaluation.refusal_pattern} is not a valid regular expression",
        ),
        (
            gate.max_kl is None or has_reference,
            "gate.max_kl requires a reference model (actor.kl_loss_coef or algorithm.kl_in_reward_coef above 0)",
        ),
    ]


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True
