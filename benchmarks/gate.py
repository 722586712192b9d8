"""Simulates comparisons of two models and prints how often the gate promotes equal and better candidates.

python -m benchmarks.gate [RUNS=1000]
"""

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_core.config.gate import GateConfig
from rl_core.evaluation.gate import decide

ROWS = (50, 200, 1000)
EFFECTS = (0.0, 0.02, 0.05, 0.1)
SAMPLES = 4
CONFIG = {"max_length_ratio": None, "max_format_drop": None, "max_refusal_rise": None}


@dataclass(frozen=True)
class Case:
    """Number of held-out rows, the candidate's gain in the probability of a right answer on each row, and whether
    scores are means of several responses (`graded`) or of one greedy answer (0 or 1)."""

    rows: int
    effect: float
    graded: bool


def share_promoted(case: Case, runs: int, seed: int) -> float:
    """Share of simulated comparisons in which the gate promotes.

    Rows differ in difficulty: the champion's probability on each is drawn from Beta(1.4, 0.6), with mean 0.7.
    """
    rng = np.random.default_rng(seed)
    config = GateConfig(metric="sampled" if case.graded else "greedy", **CONFIG)
    promoted = 0
    for _ in range(runs):
        chance = rng.beta(1.4, 0.6, case.rows)
        results = [_evaluation(rng, chance.clip(0, 1)), _evaluation(rng, (chance + case.effect).clip(0, 1))]
        promoted += decide(results[1], results[0], {}, config).promote
    return promoted / runs


def _evaluation(rng: np.random.Generator, chance: np.ndarray) -> dict[str, Any]:
    """The fields of an evaluation that the gate reads."""
    score_NK = (rng.random((len(chance), SAMPLES)) < chance[:, None]).astype(float)
    per_row = [{"source": "rows", "greedy": its[0], "sampled": its} for its in score_NK.tolist()]
    means = {"greedy": score_NK[:, 0].mean(), "sampled": score_NK.mean()}
    rest = {"sources": {"rows": {}}, "guards": {"length": 1.0}, "data": "", "settings": {}}
    return {**means, "intervals": {name: [mean, mean] for name, mean in means.items()}, "per_row": per_row, **rest}


def main(arguments: list[str]) -> int:
    """Simulates and prints the table."""
    runs = int(arguments[0]) if arguments else 1000
    print("| score | held-out rows | " + " | ".join(f"{effect:+.2f}" for effect in EFFECTS) + " |")
    print("|---" * (len(EFFECTS) + 2) + "|")
    for graded in (False, True):
        for rows in ROWS:
            shares = [share_promoted(Case(rows, effect, graded), runs, seed=rows) for effect in EFFECTS]
            name = f"mean of {SAMPLES} samples" if graded else "greedy, 0 or 1"
            print(f"| {name} | {rows} | " + " | ".join(f"{share:.1%}" for share in shares) + " |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
