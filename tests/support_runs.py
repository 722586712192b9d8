"""Runs made by hand in a home folder, as real ones write them, for tests of what is shown of runs."""

from pathlib import Path

from rl_core.config.compose import compose
from rl_core.storage import run_files
from rl_core.storage.ledger import Ledger
from rl_core.storage.store import Store
from tasks.runs.open_run import open_run

SIZES = ["trainer.steps=4", "data.train_batch_size=8", "actor.mini_batch_size=4"]
SAMPLE = {"prompt": "Sort: 3 1 2", "ground_truth": "1 2 3", "answer": "1 2 3", "score": 1.0}


def make_run(home: Path, name: str, *overrides: str, steps: int = 4, gain: float = 0.1) -> Store:
    """A run with `steps` committed steps, whose reward rises by `gain` a step; evaluated where it has ended."""
    run = open_run(compose("demo", [*SIZES, *overrides]), home, name)
    run.close()
    for step in range(1, steps + 1):
        metrics = {"reward/mean": gain * step, "actor/entropy": 1 / step, "time/rollout": 2.0, "time/step": 2.0}
        Ledger(run.store).write(step, {"step": step, "time": 1000.0 + step, "metrics": metrics})
        run.store.write_json(f"{run_files.checkpoint(step)}/state.json", {})
        run.store.commit_folder(run_files.checkpoint(step), {"step": step})
    for step in (0, steps) if steps == 4 else (0,):
        score = {"greedy": 0.25 + gain * step, "sampled": 0.125, "rows": 1, "samples": [SAMPLE]}
        run.store.write_json(run_files.evaluation(step), score)
    return run.store
