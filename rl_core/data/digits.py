"""Generated problems about a line of digits; sources differ in the answer, and splits share no multiset of digits."""

import functools
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable

import numpy as np

from rl_core.config.data import SourceConfig
from rl_core.data.rows import Row, make_row
from rl_core.errors import InputError

TRAIN_ROWS, VAL_ROWS = 4096, 256
HELD_OUT_SHARE = 8
"""One in this many digit multisets is held out."""
ENUMERABLE = 8
"""Maximum digits for which the held-out problems are counted; for more, there are too many to enumerate."""


def digit_rows(
    config: SourceConfig, seed: int, source: str, ability: str, answer: Callable[[str], str]
) -> tuple[list[Row], list[Row]]:
    """Training rows (with repeats) and held-out rows (unique); `answer(line of digits)` is the ground truth.

    Raises InputError if more held-out rows are requested than exist.
    """
    val_rows = config.val_rows or VAL_ROWS
    if config.difficulty <= ENUMERABLE:
        _check_enough(config.difficulty, val_rows, seed)

    def rows(split: str, count: int) -> list[Row]:
        lines = _draw(config.difficulty, count, seed, held_out=split == "val")
        pairs = [(" ".join(line), answer(line)) for line in lines]
        return [make_row(source, line, ability, truth, truth, split, i) for i, (line, truth) in enumerate(pairs)]

    return rows("train", config.train_rows or TRAIN_ROWS), rows("val", val_rows)


def _draw(digits: int, count: int, seed: int, held_out: bool) -> list[str]:
    """Problems of one split, uniform over its problems; held-out ones without repeats."""
    generator = np.random.default_rng([seed, int(held_out)])
    problems: list[str] = []
    seen: set[str] = set()
    while len(problems) < count:
        for line in generator.integers(0, 10, size=(4096, digits)):
            text = "".join(map(str, line))
            if _is_held_out("".join(sorted(text)), seed) != held_out or (held_out and text in seen):
                continue
            seen.add(text)
            problems.append(text)
            if len(problems) == count:
                break
    return problems


@functools.lru_cache(maxsize=1 << 16)
def _is_held_out(sorted_digits: str, seed: int) -> bool:
    # By the multiset, not the line: whatever order a source asks for, training reveals nothing about a held-out answer.
    digest = hashlib.sha256(f"{seed}:{sorted_digits}".encode()).digest()
    return digest[0] % HELD_OUT_SHARE == 0


def _check_enough(digits: int, val_rows: int, seed: int) -> None:
    multisets = ["".join(m) for m in itertools.combinations_with_replacement("0123456789", digits)]
    held_out = sum(_orderings(multiset) for multiset in multisets if _is_held_out(multiset, seed))
    if val_rows > held_out:
        raise InputError(
            f"at most {held_out} held-out rows of {digits} digits",
            f"{val_rows}",
            "data.val_rows",
            f"set data.val_rows={held_out} or raise data.difficulty" if held_out else "raise data.difficulty",
        )


def _orderings(multiset: str) -> int:
    return math.factorial(len(multiset)) // math.prod(math.factorial(n) for n in Counter(multiset).values())
