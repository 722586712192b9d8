"""The settings of what is measured on held-out rows, and of what has to hold before a version becomes champion."""

import re
from typing import Literal

from pydantic import Field

from rl_core.config.learning import Section


class EvaluationConfig(Section):
    """Evaluation on the held-out rows."""

    sampled_n: int = Field(4, ge=1)
    """Sampled responses per held-out prompt."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of the sampled score."""
    refusal_pattern: str = r"(?i)\b(I cannot|I can't|I am unable|I'm unable|as an AI)\b"
    """Regular expression; a greedy answer that holds a match counts as a refusal."""


class GateConfig(Section):
    """What moves the alias champion; the champion is scored on the same rows and seeds as the new version."""

    mode: Literal["off", "dry_run", "enforce"] = "enforce"
    """off: versions are registered and no alias but `candidate` moves. dry_run: decides and says what it would do.
    enforce: moves the alias `champion` when all checks pass."""
    approval: bool = False
    """A version that passes waits for `rollforward promote VERSION --approve` instead of becoming champion at once."""
    metric: Literal["greedy", "sampled"] = "greedy"
    """Score that is compared: of the greedy answer, or the mean over `evaluation.sampled_n` sampled ones."""
    alpha: float = Field(0.05, gt=0, lt=0.5)
    """Largest share of promotions among versions that are no better than the champion."""
    min_effect: float = Field(0.0, ge=0)
    """What the score must have gained for certain: the lower end of the difference's interval must be above it."""
    min_score: float = 0.0
    """Score below which nothing becomes champion; for the first model this alone is what its score is held against."""
    max_length_ratio: float | None = Field(2.0, gt=1)
    """Greedy answers may be so many times as long (mean tokens) as the champion's; null does not look."""
    max_format_drop: float | None = Field(0.05, gt=0, le=1)
    """What may be lost of the share of greedy answers that end by themselves; null does not look."""
    max_refusal_rise: float | None = Field(0.05, gt=0, le=1)
    """What the share of greedy answers that refuse may gain; null does not look."""
    max_source_drop: float | None = Field(0.1, gt=0)
    """What the score may lose on any one of several data sources; null does not look."""
    max_kl: float | None = Field(None, gt=0)
    """Largest `kl/ref` (nats per token), mean of the last 10 steps; null does not look."""
    min_entropy: float | None = Field(None, gt=0)
    """Smallest `actor/entropy` (nats per token), mean of the last 10 steps; null does not look."""
    max_mismatch: float | None = Field(None, gt=0)
    """Largest `kl/rollout_k3` between rollout engine and trainer, mean of the last 10 steps; null does not look."""
    reload: bool = True
    """Load the registered version in a process of its own and compare its log-probs with the trainer's."""
    reload_tolerance: float | None = Field(None, gt=0)
    """Largest difference of log-probs after a reload; unset takes `rollout.canary_tolerance`."""


def gate_checks(evaluation: EvaluationConfig, gate: GateConfig, has_reference: bool) -> list[tuple[object, str]]:
    """What has to hold of these settings, each with the words for when it does not."""
    return [
        (
            _is_pattern(evaluation.refusal_pattern),
            f"evaluation.refusal_pattern={evaluation.refusal_pattern} is no regular expression",
        ),
        (
            gate.max_kl is None or has_reference,
            "gate.max_kl looks at the KL to the reference, which is there only with actor.kl_loss_coef above 0",
        ),
    ]


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True
