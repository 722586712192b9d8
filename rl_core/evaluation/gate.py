"""The gate: decides from evaluations whether a new version becomes champion, and records every check.

The candidate must be significantly better than the champion and must not regress on the guards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from rl_core.config.gate import GateConfig
from rl_core.errors import InputError
from rl_core.evaluation.statistics import chance, paired_bootstrap

Result = Mapping[str, Any]
"""An evaluation (rl_core/evaluation/evaluate.py), or `{"problem": message}` if it failed."""

CONSTANT = "constant"
"""Name of the check of a first version without `gate.min_score`."""
SEED = 0
"""Seed of the resampling, fixed so that the same results give the same decision."""


@dataclass(frozen=True)
class Check:
    """One condition: the measured value, its interval if it has one, the limit, and the text shown to users."""

    name: str
    passed: bool
    value: float | None
    low: float | None
    high: float | None
    limit: float | None
    words: str


@dataclass(frozen=True)
class Decision:
    """Whether all checks passed (`promote`), and the mode, which determines the action taken."""

    promote: bool
    mode: Literal["off", "dry_run", "enforce"]
    checks: tuple[Check, ...]

    def as_json(self) -> dict[str, Any]:
        """Returns the decision as JSON values."""
        return asdict(self) | {"checks": [asdict(check) for check in self.checks]}

    @property
    def awaits_approval(self) -> bool:
        """Whether only the comparison of a first version with a constant answer failed, which a user may judge."""
        return [check.name for check in self.checks if not check.passed] == [CONSTANT]

    @property
    def words(self) -> list[str]:
        """One line per check, marked ✓ (passed) or ✗ (failed)."""
        return [f"{'✓' if check.passed else '✗'} {check.name}: {check.words}" for check in self.checks]


def decide(
    candidate: Result,
    champion: Result | None,
    training: Mapping[str, float],
    config: GateConfig,
    reload: Result | None = None,
    constant: float | None = None,
) -> Decision:
    """Compares two evaluations; raises InputError if their rows or settings differ.

    Args:
        champion: None if there is none yet; then the minimum score, or without one the score of a constant answer, the
            training guards and the reload test decide.
        training: mean of each training metric over the last steps.
        reload: result of `rl_core.evaluation.reload` plus the `tolerance`; None if the reload test did not run.
        constant: score of the best constant answer; None if unknown. Used only without champion and minimum score.
    """
    if config.mode == "off":
        return Decision(False, "off", ())
    checks = []
    if config.min_score is not None:
        checks.append(_floor(candidate, config.metric, config.min_score))
    elif champion is None:
        checks.append(_not_constant(candidate, config.metric, constant))
    if champion is not None and "problem" in champion:
        text = f"could not be evaluated: {champion['problem']}"
        checks.append(Check("champion", False, None, None, None, None, text))
    elif champion is not None:
        _check_same(candidate, champion)
        checks += [*_better(candidate, champion, config), *_guards(candidate, champion, config)]
        checks += _sources(candidate, champion, config)
    checks += [*_training(training, config), *(_reload(reload) if reload else [])]
    return Decision(all(check.passed for check in checks), config.mode, tuple(checks))


def row_scores(result: Result, metric: str, source: str | None = None) -> np.ndarray:
    """One score per row [N], of one data source or all; sampled scores are averaged over the row's responses."""
    rows = [row for row in result["per_row"] if source in (None, row["source"])]
    return np.array([np.mean(row[metric]) for row in rows], dtype=np.float64)


def _check_same(candidate: Result, champion: Result) -> None:
    for key, what in (("data", "held-out rows"), ("settings", "evaluation settings")):
        if candidate[key] != champion[key]:
            raise InputError(
                f"two evaluations with the same {what}",
                f"{candidate[key]} (candidate) and {champion[key]} (champion)",
                "promotion gate",
                "evaluate the champion in the candidate's run",
            )


def _floor(candidate: Result, metric: str, limit: float) -> Check:
    score, (low, high) = float(candidate[metric]), candidate["intervals"][metric]
    text = f"{metric} score {score:.3f} (minimum {limit:.3f})"
    return Check("floor", score >= limit, score, low, high, limit, text)


def _not_constant(candidate: Result, metric: str, constant: float | None) -> Check:
    score, (low, high) = float(candidate[metric]), candidate["intervals"][metric]
    if constant is None:
        text = f"{metric} score {score:.3f}; that of a constant answer is unknown, so gate.min_score is required"
        return Check(CONSTANT, False, score, low, high, None, text)
    text = f"{metric} score {score:.3f}, which must exceed that of the best constant answer (limit {constant:.3f})"
    return Check(CONSTANT, score > constant, score, low, high, constant, text)


def _better(candidate: Result, champion: Result, config: GateConfig) -> list[Check]:
    """The bootstrap interval measures the gain; the exact test is also valid if few rows differ, the bootstrap is
    not."""
    ours, theirs = row_scores(candidate, config.metric), row_scores(champion, config.metric)
    level, limit = 1 - 2 * config.alpha, config.min_effect
    mean, low, high = paired_bootstrap(ours, theirs, level, SEED)
    scores = f"{config.metric} score {ours.mean():.3f}, champion {theirs.mean():.3f}"
    gain = (
        f"{scores} on {len(ours)} rows; difference {mean:+.3f}, {level:.0%} interval {low:+.3f} to {high:+.3f} "
        f"(minimum {limit:+.3f})"
    )
    p_value = chance(ours, theirs, SEED)
    significance = f"{scores}; p = {p_value:.3f} under equal models (limit {config.alpha:.3f})"
    return [
        Check("better", low > limit, mean, low, high, limit, gain),
        Check("chance", p_value <= config.alpha, p_value, None, None, config.alpha, significance),
    ]


def _guards(candidate: Result, champion: Result, config: GateConfig) -> list[Check]:
    length = float(champion["guards"]["length"])
    longer = None if config.max_length_ratio is None else (config.max_length_ratio - 1) * length
    guards = [
        ("length", "length", "mean answer length in tokens", 1, longer),
        ("format", "ended", "share of untruncated answers", -1, config.max_format_drop),
        ("refusal", "refused", "share of refusals", 1, config.max_refusal_rise),
    ]
    return [
        _not_worse(name, what, row_scores(candidate, column), row_scores(champion, column), direction, margin, config)
        for name, column, what, direction, margin in guards
        if margin is not None
    ]


def _sources(candidate: Result, champion: Result, config: GateConfig) -> list[Check]:
    """One check per data source; none if there is only one source."""
    if config.max_source_drop is None or len(champion["sources"]) < 2:
        return []
    metric, margin = config.metric, config.max_source_drop
    return [
        _not_worse(
            f"source {source}",
            f"{metric} score",
            row_scores(candidate, metric, source),
            row_scores(champion, metric, source),
            -1,
            margin,
            config,
        )
        for source in champion["sources"]
    ]


def _not_worse(
    name: str,
    what: str,
    ours: np.ndarray,
    theirs: np.ndarray,
    direction: int,
    margin: float,
    config: GateConfig,
) -> Check:
    """Non-inferiority test: the interval of the difference must stay within the margin.

    `direction` is 1 if larger values are worse, -1 if smaller ones are.
    """
    level = 1 - 2 * config.alpha
    mean, low, high = paired_bootstrap(ours, theirs, level, SEED)
    limit = direction * margin
    passed = high <= limit if direction > 0 else low >= limit
    text = (
        f"{what} {ours.mean():.3f}, champion {theirs.mean():.3f}; difference {mean:+.3f}, "
        f"{level:.0%} interval {low:+.3f} to {high:+.3f} ({'maximum' if direction > 0 else 'minimum'} {limit:+.3f})"
    )
    return Check(name, passed, mean, low, high, limit, text)


def _training(training: Mapping[str, float], config: GateConfig) -> list[Check]:
    guards: Sequence[tuple[str, str, float | None, bool]] = [
        ("KL", "kl/ref", config.max_kl, True),
        ("entropy", "actor/entropy", config.min_entropy, False),
        ("mismatch", "kl/rollout_k3", config.max_mismatch, True),
    ]
    checks = []
    for name, metric, limit, is_maximum in guards:
        if limit is None:
            continue
        value = training.get(metric)
        passed = value is not None and (value <= limit if is_maximum else value >= limit)
        measured = f"{metric} was not measured" if value is None else f"mean {metric} of the last steps {value:.4g}"
        text = f"{measured} ({'maximum' if is_maximum else 'minimum'} {limit:.4g})"
        checks.append(Check(name, passed, value, None, None, limit, text))
    return checks


def _reload(found: Result) -> list[Check]:
    """Checks the log-probs of fixed tokens, and that each token of the greedy answers is still the most likely one.

    The limit of the greedy gap is twice the tolerance: two log-probs can each shift by the tolerance.
    """
    if "problem" in found:
        return [Check("reload", False, None, None, None, None, f"the version could not be loaded: {found['problem']}")]
    tolerance = float(found["tolerance"])
    limits = [
        ("log_prob_difference", "log-probs differ by at most", tolerance),
        ("greedy_gap", "greedy gap", 2 * tolerance),
    ]
    return [
        Check(
            f"reload, {key.replace('_', ' ')}",
            float(found[key]) <= limit,
            float(found[key]),
            None,
            None,
            limit,
            f"{what} {_scientific(float(found[key]))} (limit {limit:.1e})",
        )
        for key, what, limit in limits
    ]


def _scientific(value: float) -> str:
    return f"{value:.1e}" if value else "0.0"
