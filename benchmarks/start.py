"""Times of a small `rollforward run`: first line, first step, summary, end, and CPU seconds by process.

    python -m benchmarks.start [REPEATS]

Each repeat is a run in the same fresh home folder, so the first one creates the databases. For another version of the
code run it from its checkout; compare versions alternately on a machine that does nothing else.
"""

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import psutil

SETTINGS = [
    "data.train_batch_size=8",
    "actor.mini_batch_size=4",
    "data.val_rows=32",
    "data.train_rows=128",
    "rollout.n=4",
    "warm_start.steps=20",
    "trainer.steps=6",
    "trainer.segment_steps=3",
    "evaluation.sampled_n=1",
    "gate.reload=false",
]
MARKS = {"first line": "prepare data", "first step": "step 1/6", "summary": "Run "}
POLL_S = 0.1
KINDS = {
    "rollforward run": "command",
    "prefect.server": "Prefect's server",
    "ray::": "workers",
    "multiprocessing": "scoring",
    "guardian": "guardian",
}


def main() -> None:
    """Prints one row per repeat."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory(prefix="rfb") as home:
        for number in range(repeats):
            times, cpu = measure(Path(home), f"start-{number}")
            print("  ".join(f"{name} {seconds:.1f} s" for name, seconds in times.items()))
            print(f"  CPU {sum(cpu.values()):.1f} s: " + ", ".join(f"{kind} {s:.1f}" for kind, s in cpu.items()))


def measure(home: Path, name: str) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds until each mark and the end, and CPU seconds by kind of process."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PREFECT_"))}
    environment |= {"ROLLFORWARD_HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[1])}
    seen: dict[int, tuple[str, float]] = {}
    over = threading.Event()
    watching = threading.Thread(target=_watch, args=(str(home), seen, over))
    watching.start()
    start, times = time.monotonic(), {}
    command = [str(Path(sys.executable).with_name("rollforward")), "run", "demo", "--run", name, *SETTINGS]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            for mark, text in MARKS.items():
                if mark not in times and re.search(rf"^(▸ |  )?{re.escape(text)}", line):
                    times[mark] = time.monotonic() - start
    times["end"] = time.monotonic() - start
    over.set()
    watching.join()
    cpu: defaultdict[str, float] = defaultdict(float)
    for kind, seconds in seen.values():
        cpu[kind] += seconds
    return times, cpu


def _watch(home: str, seen: dict[int, tuple[str, float]], over: threading.Event) -> None:
    while not over.wait(POLL_S):
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("ROLLFORWARD_HOME") == home:
                    words, used = " ".join(process.cmdline()), process.cpu_times()
                    kind = next((kind for part, kind in KINDS.items() if part in words), "Ray")
                    if re.search(r"ray::\w*(Agent|IDLE)", words):
                        kind = "Ray"
                    seen[process.pid] = kind, used.user + used.system


if __name__ == "__main__":
    main()
