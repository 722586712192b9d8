"""Evaluations as the gate reads them, out of scores that are given."""

from collections.abc import Sequence
from typing import Any

from rl_core.evaluation.evaluate import summary


def evaluation(
    greedy: Sequence[float],
    sampled: Sequence[Sequence[float]] | None = None,
    source: Sequence[str] | None = None,
    length: Sequence[float] | None = None,
    ended: Sequence[bool] | None = None,
    refused: Sequence[bool] | None = None,
) -> dict[str, Any]:
    """The result of an evaluation with these values of its rows."""
    n = len(greedy)
    per_row = [
        {
            "index": i,
            "source": source[i] if source else "rows",
            "greedy": float(greedy[i]),
            "sampled": [float(score) for score in sampled[i]] if sampled is not None else [float(greedy[i])],
            "maj_at_k": float(greedy[i]),
            "length": float(length[i]) if length else 10.0,
            "ended": ended[i] if ended else True,
            "refused": refused[i] if refused else False,
            "failed": False,
        }
        for i in range(n)
    ]
    return {**summary(per_row, 0), "per_row": per_row, "weights": "w", "data": "d", "settings": {}}
