"""Made problems: sort the digits of a line."""

import functools
import hashlib
import itertools
import math
from collections import Counter

import numpy as np

from rl_core.config.schema import DataConfig
from rl_core.data.rows import Row, make_row
from rl_core.errors import InputError

SCORER = "exact"
TRAIN_ROWS, VAL_ROWS = 4096, 256
HELD_OUT_SHARE = 8
"""One in this many digit multisets is held out."""
ENUMERABLE = 8
"""Up to this many digits the held-out problems are counted; above there are more than a memory holds."""


def rows(config: DataConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """Training rows (with repeats) and held-out rows (unique); no multiset of digits is in both.

    Raises InputError when more held-out rows are asked for than exist.
    """
    wanted = config.val_rows or VAL_ROWS
    if config.difficulty <= ENUMERABLE:
        _check_enough(config.difficulty, wanted, seed)
    train = _draw(config.difficulty, config.train_rows or TRAIN_ROWS, seed, held_out=False)
    held_out = _draw(config.difficulty, wanted, seed, held_out=True)
    return _to_rows(train, "train"), _to_rows(held_out, "val")


def reference_response(row: Row) -> str:
    """The sorted digits."""
    return row["reward_model"]["ground_truth"]


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
    # By the answer, not by the line: nothing about a held-out problem's answer is seen in training.
    digest = hashlib.sha256(f"{seed}:{sorted_digits}".encode()).digest()
    return digest[0] % HELD_OUT_SHARE == 0


def _check_enough(digits: int, wanted: int, seed: int) -> None:
    multisets = ["".join(m) for m in itertools.combinations_with_replacement("0123456789", digits)]
    held_out = sum(_orderings(multiset) for multiset in multisets if _is_held_out(multiset, seed))
    if wanted > held_out:
        raise InputError(
            f"at most {held_out} held-out rows of {digits} digits",
            f"{wanted}",
            "data.val_rows",
            f"set data.val_rows={held_out} or raise data.difficulty" if held_out else "raise data.difficulty",
        )


def _orderings(multiset: str) -> int:
    return math.factorial(len(multiset)) // math.prod(math.factorial(n) for n in Counter(multiset).values())


def _to_rows(problems: list[str], split: str) -> list[Row]:
    lines = [(" ".join(text), " ".join(sorted(text))) for text in problems]
    return [
        make_row("sort_digits", line, "sorting", answer, answer, split, i) for i, (line, answer) in enumerate(lines)
    ]
