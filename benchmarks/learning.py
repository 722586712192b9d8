"""Measures how many steps each algorithm needs until a tiny model has learned, and prints a table.

python -m benchmarks.learning [SEEDS=5] [NAME …]; tests/learning runs one seed of each.
"""

import statistics
import sys
import tempfile
from pathlib import Path

from flows.home import prepare_environment


def main(arguments: list[str]) -> int:
    """Measures the named cases, or all, over the seeds."""
    seeds = int(arguments.pop(0)) if arguments and arguments[0].isdigit() else 5
    with tempfile.TemporaryDirectory(prefix="rfl") as folder:
        prepare_environment(Path(folder))
        from benchmarks.learner import CASES, TARGET, learner  # imports Ray, which reads the environment

        print(f"| name | steps to {TARGET} for seeds 0 to {seeds - 1} | median | range |\n|---|---|---|---|")
        with learner(Path(folder)) as made:
            for name in arguments or CASES:
                found = [made.steps(CASES[name], seed)[0] for seed in range(seeds)]
                reached = [steps for steps in found if steps is not None]
                middle = f"{statistics.median(reached):g} | {min(reached)}–{max(reached)}" if reached else "– | –"
                print(f"| {name} | {', '.join(str(steps or 'never') for steps in found)} | {middle} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
