"""Generated problems: products of two numbers, which a small model can only solve with the tool `calculator`."""

import hashlib
from typing import Any

import numpy as np

from rl_core.config.data import SourceConfig
from rl_core.data.rows import Row, make_row
from rl_core.errors import InputError

SCORER = "numeric"
TRAIN_ROWS, VAL_ROWS = 4096, 256
HELD_OUT_SHARE = 8
"""One in this many unordered pairs of numbers is held out."""
CALLING_SHARE = 3
"""One in this many reference conversations calls the calculator; calling it always is left to reinforcement."""


def rows(config: SourceConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """Training rows (with repeats) and held-out rows (unique) with factors of `difficulty` digits.

    Raises InputError if more held-out rows are requested than exist.
    """
    val_rows, low, high = config.val_rows or VAL_ROWS, 10 ** (config.difficulty - 1), 10**config.difficulty
    if val_rows > (high - low) ** 2 // (2 * HELD_OUT_SHARE):
        raise InputError(
            f"at most {(high - low) ** 2 // (2 * HELD_OUT_SHARE)} held-out products of {config.difficulty} digits",
            f"{val_rows}",
            "data.val_rows",
            "raise data.difficulty or lower data.val_rows",
        )

    def split(name: str, count: int) -> list[Row]:
        generator = np.random.default_rng([seed, name == "val"])
        rows: dict[Any, Row] = {}
        while len(rows) < count:
            a, b = generator.integers(low, high, size=2).tolist()
            key = (a, b) if name == "val" else len(rows)
            if _is_held_out(a, b, seed) == (name == "val") and key not in rows:
                truth = str(a * b)
                rows[key] = make_row("arithmetic", f"{a} * {b}", "arithmetic", truth, truth, name, len(rows))
        return list(rows.values())

    return split("train", config.train_rows or TRAIN_ROWS), split("val", val_rows)


def reference_response(row: Row) -> str | list[dict[str, str]]:
    """`=` and the product, either directly or after a call of the calculator and its result."""
    expression, result = row["prompt"][0]["content"].replace(" ", ""), row["reward_model"]["ground_truth"]
    # The first token decides whether to call, so the greedy answer after the warm start is the more frequent one.
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
