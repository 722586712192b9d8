"""Runs the demo for several seeds and prints a table of scores before and after training.

python benchmarks/demo_seeds.py [SEEDS=5] [a.b=value …]
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = str(Path(sys.executable).parent / "rollforward")


def main(arguments: list[str]) -> int:
    """Runs the demo once per seed, in a temporary home folder."""
    seeds = int(arguments.pop(0)) if arguments and arguments[0].isdigit() else 5
    print(
        "| seed | sampled before | sampled after | greedy before | greedy after | seconds |\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            start, run = time.monotonic(), ["run", "demo", "--run", f"seed-{seed}", f"trainer.seed={seed}", *arguments]
            done = subprocess.run(
                [COMMAND, *run],
                env={**os.environ, "ROLLFORWARD_HOME": folder},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                print(done.stdout, done.stderr)
                return done.returncode
            files = sorted(Path(folder, "runs", f"seed-{seed}", "evaluation").glob("step_*.json"))
            before, after = (json.loads(file.read_text()) for file in files)
            scores = [before["sampled"], after["sampled"], before["greedy"], after["greedy"]]
            print(f"| {seed} | {' | '.join(f'{s:.3f}' for s in scores)} | {time.monotonic() - start:.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
