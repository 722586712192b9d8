"""Whether a new version becomes champion: a decision out of evaluations, with every check and its figures.

The candidate must be better than the champion beyond chance, and show that what nobody asked it to learn is not lost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from rl_core.config.gate import GateConfig
from rl_core.errors import InputError
from rl_core.evaluation.statistics import chance, paired_bootstrap

Result = Mapping[str, Any]
"""An evaluation (rl_core/evaluation/evaluate.py), or `{"problem": words}` of one that could not be made."""

SEED = 0
"""Of the resampling: the same results give the same decision."""


@dataclass(frozen=True)
class Check:
    """One condition: what was measured, its interval where it has one, the limit, and the words for people."""

    name: str
    passed: bool
    value: float | None
    low: float | None
    high: float | None
    limit: float | None
    words: str


@dataclass(frozen=True)
class Decision:
    """Whether all checks allow the promotion; the mode says what is done about it."""

    promote: bool
    mode: Literal["off", "dry_run", "enforce"]
    checks: tuple[Check, ...]

    def as_json(self) -> dict[str, Any]:
        """The decision as JSON values."""
        return asdict(self) | {"checks": [asdict(check) for check in self.checks]}

    @property
    def words(self) -> list[str]:
        """A line a check, with a mark for those that failed."""
        return [f"{'✓' if check.passed else '✗'} {check.name}: {check.words}" for check in self.checks]


def decide(
    candidate: Result,
    champion: Result | None,
    training: Mapping[str, float],
    config: GateConfig,
    reload: Result | None = None,
) -> Decision:
    """The decision on two evaluations of the same rows with the same settings; raises InputError when they differ.

    Args:
        champion: None when there is none yet; then the score's floor and the training guards decide.
        training: mean of each training metric over the last steps.
        reload: what `rl_core.evaluation.reload` found, with the `tolerance`; None when that was not tried.
    """
    if config.mode == "off":
        return Decision(False, "off", ())
    checks = [_floor(candidate, config)]
    if champion is not None and "problem" in champion:
        checks.append(Check("champion", False, None, None, None, None, f"it has no score here: {champion['problem']}"))
    elif champion is not None:
        _check_same(candidate, champion)
        checks += [*_better(candidate, champion, config), *_guards(candidate, champion, config)]
        checks += _sources(candidate, champion, config)
    checks += [*_training(training, config), *(_reload(reload) if reload else [])]
    return Decision(all(check.passed for check in checks), config.mode, tuple(checks))


def row_scores(result: Result, metric: str, source: str | None = None) -> np.ndarray:
    """A score a row [N], of one data source or all; the sampled one is the mean over the row's responses."""
    rows = [row for row in result["per_row"] if source in (None, row["source"])]
    return np.array([np.mean(row[metric]) for row in rows], dtype=np.float64)


def _check_same(candidate: Result, champion: Result) -> None:
    for key, what in (("data", "held-out rows"), ("settings", "settings of the evaluation")):
        if candidate[key] != champion[key]:
            raise InputError(
                f"two evaluations on the same {what}",
                f"{candidate[key]} and {champion[key]}",
                "the gate",
                "evaluate the champion in the run of the candidate",
            )


def _floor(candidate: Result, config: GateConfig) -> Check:
    score, limit = float(candidate[config.metric]), config.min_score
    low, high = candidate["intervals"][config.metric]
    words = f"{config.metric} score {score:.3f}, at least {limit:.3f} is asked for"
    return Check("floor", score >= limit, score, low, high, limit, words)


def _better(candidate: Result, champion: Result, config: GateConfig) -> list[Check]:
    """The interval shows how much is gained; the exact test also holds where few rows differ, which resampling does
    not."""
    ours, theirs = row_scores(candidate, config.metric), row_scores(champion, config.metric)
    level, limit = 1 - 2 * config.alpha, config.min_effect
    mean, low, high = paired_bootstrap(ours, theirs, level, SEED)
    words = (
        f"{config.metric} score {ours.mean():.3f} against {theirs.mean():.3f} on {len(ours)} rows, {mean:+.3f}; the "
        f"{level:.0%} interval {low:+.3f} to {high:+.3f} must lie above {limit:+.3f}"
    )
    by_chance = chance(ours, theirs, SEED)
    odds = (
        f"of equally good models one leads by so much in {by_chance:.1%} of comparisons, {config.alpha:.1%} is allowed"
    )
    return [
        Check("better", low > limit, mean, low, high, limit, words),
        Check("chance", by_chance <= config.alpha, by_chance, None, None, config.alpha, odds),
    ]


def _guards(candidate: Result, champion: Result, config: GateConfig) -> list[Check]:
    length = float(champion["guards"]["length"])
    longer = None if config.max_length_ratio is None else (config.max_length_ratio - 1) * length
    guards = [
        ("length", "length", "mean tokens of an answer", 1, longer),
        ("format", "ended", "share of answers that end by themselves", -1, config.max_format_drop),
        ("refusal", "refused", "share of answers that refuse", 1, config.max_refusal_rise),
    ]
    return [
        _not_worse(name, what, row_scores(candidate, column), row_scores(champion, column), worse, margin, config)
        for name, column, what, worse, margin in guards
        if margin is not None
    ]


def _sources(candidate: Result, champion: Result, config: GateConfig) -> list[Check]:
    """One check a data source, where there are several."""
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
    worse: int,
    margin: float,
    config: GateConfig,
) -> Check:
    """Non-inferiority: the interval's end in the worse direction (1: up) must stay within the margin."""
    mean, low, high = paired_bootstrap(ours, theirs, 1 - 2 * config.alpha, SEED)
    limit = worse * margin
    passed = high <= limit if worse > 0 else low >= limit
    words = (
        f"{what} {ours.mean():.3f} against {theirs.mean():.3f}; the difference's interval {low:+.3f} to {high:+.3f} "
        f"must stay {'below' if worse > 0 else 'above'} {limit:+.3f}"
    )
    return Check(name, passed, mean, low, high, limit, words)


def _training(training: Mapping[str, float], config: GateConfig) -> list[Check]:
    guards: Sequence[tuple[str, str, float | None, bool]] = [
        ("KL", "kl/ref", config.max_kl, True),
        ("entropy", "actor/entropy", config.min_entropy, False),
        ("mismatch", "kl/rollout_k3", config.max_mismatch, True),
    ]
    checks = []
    for name, metric, limit, below in guards:
        if limit is None:
            continue
        value = training.get(metric)
        passed = value is not None and (value <= limit if below else value >= limit)
        seen = "was not measured in this run" if value is None else f"{value:.4g} at the end of training"
        words = f"{metric} {seen}, {'at most' if below else 'at least'} {limit:.4g} is asked for"
        checks.append(Check(name, passed, value, None, None, limit, words))
    return checks


def _reload(found: Result) -> list[Check]:
    """The trainer's log-probs of fixed tokens, and greedy answers, each of whose tokens must still be the likeliest.

    Two tokens that are equally likely may change places when each moves by the tolerance.
    """
    if "problem" in found:
        return [Check("reload", False, None, None, None, None, f"the version could not be loaded: {found['problem']}")]
    tolerance = float(found["tolerance"])
    limits = [
        ("log_prob_difference", "log-probs of fixed tokens differ from the trainer's by at most", tolerance),
        ("greedy_gap", "tokens of its greedy answers are behind the likeliest by at most", 2 * tolerance),
    ]
    return [
        Check(
            f"reload, {key.replace('_', ' ')}",
            float(found[key]) <= limit,
            float(found[key]),
            None,
            None,
            limit,
            f"{words} {found[key]:.1e}, {limit:.1e} is allowed",
        )
        for key, words, limit in limits
    ]
