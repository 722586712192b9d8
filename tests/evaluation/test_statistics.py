"""Statistics of held-out scores against brute force, scipy and known values."""

import itertools
import statistics
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, bootstrap

from rl_core.evaluation import statistics as held_out
from rl_core.evaluation.statistics import (
    bootstrap_interval,
    chance,
    majority_at_k,
    mcnemar,
    paired_bootstrap,
    pass_at_k,
    sign_flips,
)

SCORES = st.lists(st.floats(-2, 2, width=16), min_size=1, max_size=30)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("rows", [211, 1500])
def test_chunks_of_draws_are_different_draws(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn in chunks, which bound the memory, or all at once: the same interval and p-value."""
    values, other = rng(1).random(rows), rng(2).random(rows)

    def found() -> tuple[object, object]:
        return bootstrap_interval(values, 0.9, 0), sign_flips(values, other, 0)

    chunked = found()
    monkeypatch.setattr(held_out, "_CHUNK", rows * held_out.RESAMPLES)
    assert found() == chunked
    monkeypatch.setattr(held_out, "_CHUNK", rows * 1000)
    assert found() == chunked


@settings(max_examples=25, deadline=None)
@given(SCORES, st.integers(0, 3))
def test_an_interval_lies_within_the_values_and_holds_the_mean_where_it_is_wide(values: list[float], seed: int) -> None:
    low, high = bootstrap_interval(values, 0.999, seed)
    assert min(values) - 1e-12 <= low <= high <= max(values) + 1e-12
    assert low - 1e-9 <= statistics.fmean(values) <= high + 1e-9
    narrow_low, narrow_high = bootstrap_interval(values, 0.5, seed)
    assert low <= narrow_low <= narrow_high <= high
    assert bootstrap_interval(values, 0.999, seed) == (low, high)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1, width=16), st.floats(0, 1, width=16)), min_size=1, max_size=30))
def test_swapping_the_two_models_mirrors_the_interval(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*pairs, strict=True)
    mean, low, high = paired_bootstrap(ours, theirs, 0.9, 0)
    other_mean, other_low, other_high = paired_bootstrap(theirs, ours, 0.9, 0)
    assert (other_mean, other_low, other_high) == pytest.approx((-mean, -high, -low), abs=1e-9)


@pytest.mark.parametrize("values", [rng().beta(2, 5, 150), (rng().random(150) < 0.1) * 1.0], ids=["graded", "0 or 1"])
def test_an_interval_is_that_of_scipy(values: np.ndarray) -> None:
    low, high = bootstrap_interval(values, 0.9, 0)
    theirs = bootstrap(
        (values,), np.mean, confidence_level=0.9, n_resamples=10_000, method="percentile", random_state=1
    ).confidence_interval
    assert (low, high) == pytest.approx((theirs.low, theirs.high), abs=0.007)


def test_pairs_matter() -> None:
    hard = rng().uniform(0, 1, 400)
    mean, low, high = paired_bootstrap(hard + 0.01, hard, 0.9, 0)
    assert low == pytest.approx(mean) and high == pytest.approx(mean)
    assert paired_bootstrap(hard, hard, 0.9, 0) == (0, 0, 0)


def test_ten_thousand_resamples_of_two_thousand_rows_take_about_a_second() -> None:
    values, start = rng().uniform(0, 1, 2000), time.process_time()
    bootstrap_interval(values, 0.9, 0)
    assert time.process_time() - start < 2


def test_mcnemar_is_the_binomial_test_of_the_rows_that_differ() -> None:
    ours, theirs = rng(1).integers(0, 2, 60), rng(2).integers(0, 2, 60)
    gained, lost = int(((ours == 1) & (theirs == 0)).sum()), int(((ours == 0) & (theirs == 1)).sum())
    assert mcnemar(ours, theirs) == pytest.approx(binomtest(gained, gained + lost, alternative="greater").pvalue)
    assert mcnemar([1, 1, 1], [0, 0, 0]) == 1 / 8
    assert mcnemar([1, 0], [1, 0]) == 1.0


def test_random_swaps_agree_with_all_swaps() -> None:
    ours, theirs = rng(3).uniform(0, 1, 10), rng(4).uniform(0, 0.8, 10)
    difference = ours - theirs
    sums = [
        sum(sign * d for sign, d in zip(signs, difference, strict=True))
        for signs in itertools.product((1, -1), repeat=10)
    ]
    exact = np.mean(np.array(sums) >= difference.sum() - 1e-9)
    assert sign_flips(ours, theirs, 0) == pytest.approx(exact, abs=0.02)
    assert sign_flips(ours, ours, 0) == 1.0


def test_the_chance_is_mcnemars_for_scores_of_0_and_1_only() -> None:
    ours, theirs = [1, 1, 1, 0], [0, 0, 0, 0]
    assert chance(ours, theirs, 0) == mcnemar(ours, theirs) == 1 / 8
    assert chance([1, 1, 1, 0.5], [0, 0, 0, 0.5], 0) == sign_flips([1, 1, 1, 0.5], [0, 0, 0, 0.5], 0)


@pytest.mark.parametrize(("samples", "right", "k"), [(6, 2, 1), (6, 2, 3), (6, 5, 2), (5, 0, 5), (5, 1, 5)])
def test_pass_at_k_is_the_share_of_all_choices_of_k(samples: int, right: int, k: int) -> None:
    choices = list(itertools.combinations([True] * right + [False] * (samples - right), k))
    assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_the_commonest_answer_counts_and_of_equally_common_ones_the_first() -> None:
    assert majority_at_k(["7", "8", "8"], [1.0, 0.0, 0.0]) == 0.0
    assert majority_at_k(["7", "8", "8", "7"], [1.0, 0.0, 0.0, 1.0]) == 1.0
