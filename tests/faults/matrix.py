"""Kills each part of a run at each point of a step, lets the run go on, and holds the result against a run that nothing
disturbed.

    python tests/faults/matrix.py [--write PAGE]         every victim at every point: docs/reliability.md has the table
    python tests/faults/matrix.py --random N [--seed S]  N kills at random moments

Kills of one victim follow each other in one run, two steps apart, so a run survives 26 of them.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from support_faults import BOUNDARIES, END, ENGINE, FLOW, RAYLET, REWARD, VICTIMS, WHEN, WORKER, Kill  # noqa: E402
from support_trials import POOL, Cell, Trial, problems, shared_memory  # noqa: E402

SPACING = 2
"""Steps from kill to kill: one segment, so that each meets a stage of its own."""
POINTS = [(boundary, when) for boundary in BOUNDARIES for when in WHEN]
STEPS = SPACING * (len(POINTS) - 2 * len(END)) + 2
LATE = 10
"""Steps more than random kills are planned for: one may come late, as its victim has to live."""
AT_A_TIME = 2


def plan(victim: str, points: Sequence[tuple[str, str]] = POINTS) -> list[Kill]:
    """A kill of the victim at each of the points; those after the last step come when they come."""
    within = [(boundary, when) for boundary, when in points if boundary not in END]
    after = [(boundary, when) for boundary, when in points if boundary in END]
    kills = [Kill(victim, *point, 1 + SPACING * number) for number, point in enumerate(within)]
    return kills + [Kill(victim, *point, STEPS) for point in after]


def random_plan(number: int, seed: int, steps: int) -> list[Kill]:
    """Kills of random victims at random points of random steps."""
    draw = random.Random(seed)
    points = [point for point in POINTS if point[0] not in END]
    at = sorted(draw.randint(1, steps) for _ in range(number))
    return [Kill(draw.choice([FLOW, WORKER, RAYLET, REWARD]), *draw.choice(points), step) for step in at]


def run_all(trials: Sequence[Trial]) -> None:
    """Runs the trials, two at a time, and tells of each that has ended."""

    def run(trial: Trial) -> None:
        trial.run()
        print(f"{trial.home.name}: {len(trial.plan)} kills, {trial.attempts} flow processes, {trial.seconds:.0f} s")

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(run, trials))


def run_matrix(root: Path) -> tuple[list[Cell], list[str]]:
    """All cells, and what is not as it should be, in words."""
    before = shared_memory()
    references = {False: Trial(root / "whole", STEPS), True: Trial(root / "whole-pool", STEPS, POOL)}
    victims = [Trial(root / v.partition(" ")[0], STEPS, POOL if v == ENGINE else [], plan(v)) for v in VICTIMS]
    run_all([*references.values(), *victims])
    cells, wrong = [], []
    for trial in victims:
        reference = references[bool(trial.settings)]
        cells += trial.cells(reference)
        wrong += problems(trial, reference)
    if left := shared_memory() - before:
        wrong.append(f"shared memory is left: {sorted(left)}")
    wrong += [f"never killed: {kill}" for trial in victims for kill in trial.kills_left()]
    wrong += [f"not equal: {cell}" for cell in cells if not cell.equal]
    return cells, wrong


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a line a point, a column a victim."""
    found = {(cell.victim, cell.boundary, cell.when): cell for cell in cells}
    lines = ["| point | " + " | ".join(VICTIMS) + " |", "|---" * (1 + len(VICTIMS)) + "|"]
    for boundary, when in POINTS:
        entries = [found.get((victim, boundary, when)) for victim in VICTIMS]
        lines.append(f"| {when} {boundary} | " + " | ".join(cell.text() if cell else "–" for cell in entries) + " |")
    return "\n".join(lines)


def write_table(page: Path, text: str, seconds: float) -> None:
    """Puts the table into the page, between its two marks."""
    head, _, rest = page.read_text().partition("<!-- matrix -->")
    _, _, tail = rest.partition("<!-- end of matrix -->")
    words = f"`make faults` on 2 cores, {time.strftime('%Y-%m-%d')}, {seconds / 60:.0f} minutes:"
    page.write_text(f"{head}<!-- matrix -->\n{words}\n\n{text}\n<!-- end of matrix -->{tail}")


def run_random(root: Path, number: int, seed: int) -> list[str]:
    """What is wrong after so many random kills of one run."""
    kills, steps = random_plan(number, seed, SPACING * number), SPACING * number + LATE
    reference, trial = Trial(root / "whole", steps), Trial(root / "killed", steps, [], kills)
    run_all([reference, trial])
    for cell in trial.cells(reference):
        print(f"step {cell.step:3d}  {cell.victim} {cell.when} {cell.boundary}: {cell.text()}")
    return problems(trial, reference) + [f"never killed: {kill}" for kill in trial.kills_left()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page that gets the table")
    parser.add_argument("--random", type=int, metavar="N", help="N kills at random instead of the whole matrix")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rff") as folder:
        if options.random:
            wrong = run_random(Path(folder), options.random, options.seed)
        else:
            cells, wrong = run_matrix(Path(folder))
            print(table(cells))
            if options.write and not wrong:
                write_table(options.write, table(cells), time.monotonic() - start)
    print("\n".join(wrong) or f"all equal, nothing left ({time.monotonic() - start:.0f} s)")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
