"""Statistics of held-out scores: intervals, paired comparisons of two models, pass@k and maj@k.

The unit of resampling is the row: a sampled score is the mean over the row's responses.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from math import comb

import numpy as np
from numpy.typing import ArrayLike, NDArray

Values = NDArray[np.float64]

RESAMPLES = 10_000
_CHUNK = 1 << 21
"""Maximum count of random numbers drawn at once, which bounds the memory."""
_CHEAPER = 8
"""Approximate cost of drawing one count, in drawn rows."""


def bootstrap_interval(values: ArrayLike, level: float, seed: int) -> tuple[float, float]:
    """Central interval at confidence `level` of the mean of `values` [N]; NaN if there are none.

    Percentile bootstrap (Efron & Tibshirani 1993, chapter 13), deterministic for a given seed.
    """
    value_N = np.asarray(values, dtype=np.float64)
    if len(value_N) == 0 or value_N.min() == value_N.max():
        mean = float(value_N.mean()) if len(value_N) else float("nan")
        return mean, mean
    rng = np.random.default_rng(seed)
    value_U, count_U = np.unique(value_N, return_counts=True)

    def drawn(count: int) -> Values:
        if len(value_U) * _CHEAPER < len(value_N):  # equivalent: draw the count of each value
            return rng.multinomial(len(value_N), count_U / len(value_N), count) @ value_U / len(value_N)
        mean_C: Values = value_N[rng.integers(0, len(value_N), (count, len(value_N)), dtype=np.int32)].mean(axis=1)
        return mean_C

    # Summation rounds, so without the clip a mean can fall slightly outside the observed range.
    mean_R = _repeated(drawn, len(value_N)).clip(value_N.min(), value_N.max())
    low, high = np.quantile(mean_R, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_bootstrap(candidate: ArrayLike, champion: ArrayLike, level: float, seed: int) -> tuple[float, float, float]:
    """Mean difference of two models' scores [N] on the same rows, with its interval: (mean, low, high)."""
    difference_N = _differences(candidate, champion)
    low, high = bootstrap_interval(difference_N, level, seed)
    return float(difference_N.mean()), low, high


def mcnemar(candidate: ArrayLike, champion: ArrayLike) -> float:
    """One-sided p-value of the exact McNemar test for 0/1 scores [N] (McNemar 1947, exact binomial form).

    Probability, if both models are equally good, that the candidate alone is right on at least the observed number of
    the discordant rows.
    """
    difference_N = _differences(candidate, champion)
    gained, lost = int((difference_N > 0).sum()), int((difference_N < 0).sum())
    discordant = gained + lost
    p_value: float = sum(comb(discordant, k) for k in range(gained, discordant + 1)) / 2**discordant
    return p_value


def sign_flips(candidate: ArrayLike, champion: ArrayLike, seed: int) -> float:
    """One-sided p-value of the paired permutation test for any scores [N].

    Probability of a mean difference at least as large when the two scores of each row are swapped at random (Fisher
    1935; add-one estimate of Phipson & Smyth 2010).
    """
    difference_N = _differences(candidate, champion)
    size_U, count_U = np.unique(np.abs(difference_N[difference_N != 0]), return_counts=True)
    if len(size_U) == 0:
        return 1.0
    rng = np.random.default_rng(seed)

    def drawn(count: int) -> Values:
        positive_RU = rng.binomial(count_U, 0.5, (count, len(size_U)))
        sum_R: Values = (2.0 * positive_RU - count_U) @ size_U
        return sum_R

    sum_R, seen = _repeated(drawn, len(size_U)), difference_N.sum()
    return (1 + int((sum_R >= seen - 1e-9).sum())) / (1 + RESAMPLES)


def chance(candidate: ArrayLike, champion: ArrayLike, seed: int) -> float:
    """One-sided p-value of the candidate's lead: McNemar's test if all scores are 0 or 1, otherwise `sign_flips`."""
    both = np.concatenate([np.asarray(candidate, dtype=np.float64), np.asarray(champion, dtype=np.float64)])
    if np.isin(both, (0.0, 1.0)).all():
        return mcnemar(candidate, champion)
    return sign_flips(candidate, champion, seed)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that at least one of k responses is right, given `right` of `samples` ≥ k responses.

    The unbiased estimator 1 − C(n−c, k) / C(n, k) of Chen et al. 2021 (arXiv:2107.03374), equation 1.
    """
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def majority_at_k(answers: Sequence[str], scores: Sequence[float]) -> float:
    """Score of the most frequent of k answers to a prompt (maj@k); the first one on a tie."""
    most_frequent, _ = Counter(answers).most_common(1)[0]
    return scores[list(answers).index(most_frequent)]


def _differences(candidate: ArrayLike, champion: ArrayLike) -> Values:
    ours, theirs = np.asarray(candidate, dtype=np.float64), np.asarray(champion, dtype=np.float64)
    assert ours.shape == theirs.shape, "both models must be scored on the same rows"
    return ours - theirs


def _repeated(drawn: Callable[[int], Values], width: int) -> Values:
    """RESAMPLES values of `drawn`, drawn in chunks; `width` is the count of random numbers per value."""
    step = max(1, _CHUNK // width)
    return np.concatenate([drawn(min(step, RESAMPLES - start)) for start in range(0, RESAMPLES, step)])
