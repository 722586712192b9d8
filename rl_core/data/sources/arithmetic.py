"""Made problems: products of two numbers, which a small model can only get right by calling the tool `calculator`."""

import hashlib
from typing import Any

import numpy as np

from rl_core.config.data import SourceConfig
from rl_core.data.rows import Row, make_row
from rl_core.errors import InputError

SCORER = "numeric"
TRAIN_ROWS, VAL_ROWS = 4096, 256
HELD_OUT_SHARE = 8
"""One in this many pairs of numbers is held out, in either order."""
CALLING_SHARE = 3
"""One reference conversation in this many calls the calculator; that it should always be called is left to learn."""


def rows(config: SourceConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """Training rows (with repeats) and held-out rows (unique) with factors of `difficulty` digits.

    Raises InputError when more held-out rows are asked for than exist.
    """
    wanted, low, high = config.val_rows or VAL_ROWS, 10 ** (config.difficulty - 1), 10**config.difficulty
    if wanted > (high - low) ** 2 // (2 * HELD_OUT_SHARE):
        raise InputError(
            f"at most {(high - low) ** 2 // (2 * HELD_OUT_SHARE)} held-out products of {config.difficulty} digits",
            f"{wanted}",
            "data.val_rows",
            "raise data.difficulty or lower data.val_rows",
        )

    def split(name: str, count: int) -> list[Row]:
        generator = np.random.default_rng([seed, name == "val"])
        made: dict[Any, Row] = {}
        while len(made) < count:
            a, b = generator.integers(low, high, size=2).tolist()
            key = (a, b) if name == "val" else len(made)
            if _is_held_out(a, b, seed) == (name == "val") and key not in made:
                truth = str(a * b)
                made[key] = make_row("arithmetic", f"{a} * {b}", "arithmetic", truth, truth, name, len(made))
        return list(made.values())

    return split("train", config.train_rows or TRAIN_ROWS), split("val", wanted)


def reference_response(row: Row) -> str | list[dict[str, str]]:
    """`=` and the product, at once or after a call of the calculator and what it says."""
    expression, result = row["prompt"][0]["content"].replace(" ", ""), row["reward_model"]["ground_truth"]
    # One token decides about the way, so the greedy answer of a model that follows these takes the commoner one.
    answer = f"={result}"
    if row["extra_info"]["index"] % CALLING_SHARE:
        return answer
    return [
        {"role": "assistant", "content": f'[calculator(x="{expression}")]'},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": answer},
    ]


def _is_held_out(a: int, b: int, seed: int) -> bool:
    digest = hashlib.sha256(f"{seed}:{min(a, b)}:{max(a, b)}".encode()).digest()
    return digest[0] % HELD_OUT_SHARE == 0
