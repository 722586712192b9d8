import heapq
import random
from statistics import mean

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl_core.data.balance import balanced_parts

LENGTHS = st.lists(st.integers(0, 50), max_size=40)


def loads(lengths: list[int], groups: list[list[int]]) -> list[int]:
    return [sum(lengths[row] for row in group) for group in groups]


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 8))
@example([0, 0, 0, 9], 3)
def test_parts_are_a_balanced_partition(lengths: list[int], parts: int) -> None:
    groups = balanced_parts(lengths, parts)
    assert len(groups) == parts
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    sums = loads(lengths, groups)
    assert sums == sorted(sums, reverse=True)
    assert sums[0] - sums[-1] <= max(lengths, default=0)
    assert sum(not group for group in groups) == max(0, parts - len(lengths))
    assert balanced_parts(list(lengths), parts) == groups


@settings(deadline=None)
@given(st.integers(1, 8).flatmap(lambda k: st.tuples(st.just(k), st.lists(st.lists(
    st.integers(0, 50), min_size=k, max_size=k), max_size=6))))  # fmt: skip
def test_parts_of_equal_counts_are_a_balanced_partition(drawn: tuple[int, list[list[int]]]) -> None:
    parts, lengths = drawn[0], [length for part in drawn[1] for length in part]
    groups = balanced_parts(lengths, parts, equal_counts=True)
    assert [len(group) for group in groups] == [len(lengths) // parts] * parts
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    sums = loads(lengths, groups)
    assert sums == sorted(sums, reverse=True)
    assert sums[0] - sums[-1] <= max(lengths, default=0) - min(lengths, default=0)
    assert balanced_parts(list(lengths), parts, equal_counts=True) == groups


def greedy_spread(lengths: list[int], parts: int) -> int:
    """Longest first, each into the emptiest group."""
    sums = [0] * parts
    for length in sorted(lengths, reverse=True):
        heapq.heapreplace(sums, sums[0] + length)
    return max(sums) - min(sums)


def dealt_spread(lengths: list[int], parts: int) -> int:
    """Longest first, dealt back and forth."""
    sums = [0] * parts
    by_length = sorted(lengths, reverse=True)
    for start in range(0, len(lengths), parts):
        hand = by_length[start : start + parts]
        for group, length in enumerate(hand if start // parts % 2 == 0 else hand[::-1]):
            sums[group] += length
    return max(sums) - min(sums)


def spread(lengths: list[int], groups: list[list[int]]) -> int:
    sums = loads(lengths, groups)
    return sums[0] - sums[-1]


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_long_tails_are_balanced_better_than_by_simpler_ways(parts: int) -> None:
    ours, greedys, equal, dealt = [], [], [], []
    for seed in range(20):
        draw = random.Random(seed)
        # Most responses are short, some are very long, and a few were cut at the limit.
        lengths = [min(4096, 100 + int(draw.lognormvariate(5.5, 1.0))) for _ in range(64)]
        ours.append(spread(lengths, balanced_parts(lengths, parts)))
        greedys.append(greedy_spread(lengths, parts))
        equal.append(spread(lengths, balanced_parts(lengths, parts, equal_counts=True)))
        dealt.append(dealt_spread(lengths, parts))
    assert mean(ours) < mean(greedys) / 2, (ours, greedys)
    assert mean(equal) < mean(dealt) / 1.25, (equal, dealt)
    assert all(a <= b for a, b in zip(equal, dealt, strict=True))
