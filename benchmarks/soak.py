"""Soak test: runs many steps of the tiny model with the real command; fails if anything but the run's records grows.

python -m benchmarks.soak [--steps 2000] [--out FOLDER] [a.b=value …]

Measures each process of the run every 1/40 of the steps, and compares two windows: the steps from 20 % to 40 %, after
warm-up, and the last 30 %. Prints a table, writes `soak.json` and `soak.png` into FOLDER, and exits with code 1 if
something grows beyond the limits of `judge`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import psutil

COMMAND = str(Path(sys.executable).parent / "rollforward")
SETTINGS = [
    "data.train_batch_size=2",
    "actor.mini_batch_size=2",
    "rollout.n=2",
    "data.train_rows=64",
    "data.val_rows=8",
    "warm_start.steps=50",
    "evaluation.sampled_n=1",
    "gate.reload=false",
    "tracking.traces_per_step=1",
]
SAMPLES = 40
EARLY, LATE = (0.2, 0.4), (0.7, 1.0)
"""Windows, as shares of the steps."""
MEMORY, SLACK_BYTES = 0.02, 1 << 20
"""Allowed growth of a process's memory: a share of it, or the noise of an allocator's pages in bytes."""
STEP_TIME, STEP_CPU = 0.15, 0.05
"""Allowed growth of the median step time and of the CPU seconds per step, as shares: the noise level."""
POOL_THREADS = 2
"""Allowed growth in threads per process: Ray's GCS fills its pool late, as seen at step 972 of 2,000."""
COUNTED = ("memory", "threads", "files", "sockets")
ONE_A_STEP = ("ledger", "rollouts")
"""Folders of a run that receive one file per step."""


@dataclass(frozen=True)
class Usage:
    """Resources held by one process, and its CPU seconds so far.

    `memory` is in bytes and excludes file-backed pages, whose accounting depends on other processes.
    """

    name: str
    cpu: float
    memory: int
    threads: int
    files: int
    sockets: int


@dataclass(frozen=True)
class Sample:
    """One measurement of the run: processes by id, shared-memory segments and their bytes, and number of kept files."""

    step: int
    processes: dict[int, Usage]
    segments: int = 0
    segment_bytes: int = 0
    kept_files: int = 0


@dataclass(frozen=True)
class Soak:
    """All measurements; `seconds` has the duration of each step, in order."""

    steps: int
    samples: list[Sample]
    seconds: list[float]


@dataclass(frozen=True)
class Row:
    """A quantity in both windows, and whether it grew beyond its limit."""

    name: str
    early: float
    late: float
    unit: str = ""
    grew: bool = field(default=False)

    @property
    def growth(self) -> float:
        """Growth as a share of the early value."""
        return (self.late - self.early) / self.early if self.early else float(self.late > 0)


def judge(soak: Soak) -> list[Row]:
    """Compares all quantities of both windows.

    Limits of growth: 2 % (or 1 MiB) of memory, 2 threads per process, 15 % of step time, 5 % of CPU seconds per step,
    and none for everything else.
    """
    early, late = (window(soak.samples, soak.steps, part) for part in (EARLY, LATE))
    rows = []
    for pid, usage in late[-1].processes.items():
        # A process can be missing in single samples, since opening or closing files disturbs a measurement.
        parts = [[s.processes[pid] for s in part if pid in s.processes] for part in (early, late)]
        if any(2 * len(found) < len(part) for found, part in zip(parts, (early, late), strict=True)):
            continue
        first, last = ({name: median(getattr(one, name) for one in part) for name in COUNTED} for part in parts)
        before, after = first["memory"], last["memory"]
        allowed = max(MEMORY * before, SLACK_BYTES)
        rows.append(Row(f"{usage.name}: memory", before / 2**20, after / 2**20, "MiB", after - before > allowed))
        for name, slack in (("threads", POOL_THREADS), ("files", 0), ("sockets", 0)):
            rows.append(flat(f"{usage.name}: {name}", first[name], last[name], slack))
    rows.append(flat("processes", *(median(len(s.processes) for s in part) for part in (early, late))))
    for name in ("segments", "segment_bytes", "kept_files"):
        rows.append(flat(name.replace("_", " "), *(median(getattr(s, name) for s in part) for part in (early, late))))
    before, after = (
        median(soak.seconds[int(begin * soak.steps) : int(end * soak.steps)]) for begin, end in (EARLY, LATE)
    )
    rows.append(Row("step time", 1000 * before, 1000 * after, "ms", after > (1 + STEP_TIME) * before))
    before, after = map(cpu_of_a_step, (early, late))
    return [*rows, Row("CPU of a step", 1000 * before, 1000 * after, "ms", after > (1 + STEP_CPU) * before)]


def cpu_of_a_step(samples: Sequence[Sample]) -> float:
    """CPU seconds per step of all processes alive throughout the window."""
    first, last = samples[0], samples[-1]
    both = first.processes.keys() & last.processes.keys()
    return sum(last.processes[pid].cpu - first.processes[pid].cpu for pid in both) / (last.step - first.step)


def flat(name: str, early: float, late: float, slack: float = 0) -> Row:
    """A quantity that must not grow by more than `slack`."""
    return Row(name, early, late, "", late > early + slack)


def window(samples: Sequence[Sample], steps: int, part: tuple[float, float]) -> list[Sample]:
    """Samples within a share of the steps."""
    return [sample for sample in samples if part[0] * steps < sample.step <= part[1] * steps]


def measure(root: psutil.Process, home: Path, step: int) -> Sample:
    """Measures the run's processes and files."""
    processes: dict[int, Usage] = {}
    segments: dict[str, int] = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            with process.oneshot():
                files = [os.readlink(file.path) for file in os.scandir(f"/proc/{process.pid}/fd")]
                processes[process.pid] = Usage(
                    name_of(process.cmdline()),
                    sum(process.cpu_times()[:2]),
                    anonymous_bytes(process.pid),
                    process.num_threads(),
                    len(files),
                    sum(file.startswith("socket:") for file in files),
                )
                maps = Path(f"/proc/{process.pid}/maps").read_text()
            for path in re.findall(r"(/dev/shm/\S+)(?: \(deleted\))?$", maps, re.MULTILINE):
                segments[path] = os.stat(path).st_blocks * 512 if os.path.exists(path) else 0
        except (psutil.Error, OSError):
            continue  # the process has ended
    kept = (file for file in home.rglob("*") if file.is_file() and file.parent.name not in ONE_A_STEP)
    return Sample(step, processes, len(segments), sum(segments.values()), sum(1 for _ in kept))


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is not file-backed: heap and stacks."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(1024 * int(size) for size in re.findall(r"^(?:Anonymous|Swap): +(\d+) kB$", text, re.MULTILINE))


def name_of(words: Sequence[str]) -> str:
    """A process's name for the table."""
    line = " ".join(words)
    for pattern, name in (
        (r"ray::(IDLE|DashboardAgent|RuntimeEnvAgent)", r"ray \1"),
        (r"ray::", "worker"),  # its title changes with the current call
        (r"/(raylet|gcs_server) ", r"ray \1"),
        (r"/ray/\S*/(\w+\.py)\b", r"ray \1"),
        (r"uvicorn.*prefect", "prefect server"),
        (r"(resource_tracker|forkserver|spawn_main)", r"python \1"),
        (r"rl_core\.guardian", "guardian"),
        (r"rollforward run", "rollforward"),
    ):
        if found := re.search(pattern, line):
            return found.expand(name).strip()
    return Path(words[0]).name if words else "?"


def watched(process: subprocess.Popen[bytes], home: Path, steps: int) -> Iterator[Sample]:
    """Yields a sample after every 1/40 of the steps, until the run ends."""
    root, status, next_step = psutil.Process(process.pid), home / "runs/soak/status.json", 0.0
    while process.poll() is None:
        time.sleep(0.2)
        step = json.loads(status.read_text())["step"] if status.exists() else 0
        if step >= next_step and 0 < step < steps:
            yield measure(root, home, step)
            next_step = step + steps / SAMPLES


def run(steps: int, home: Path, settings: Sequence[str]) -> Soak:
    """Runs the command to completion; raises RuntimeError with its output if it fails."""
    log = home / "soak.log"
    words = ["run", "demo", "--run", "soak", f"trainer.steps={steps}", *SETTINGS, *settings]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [COMMAND, *words],
            env={**os.environ, "ROLLFORWARD_HOME": str(home)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            samples = list(watched(process, home, steps))
        finally:
            process.terminate()
            code = process.wait()
    if code:
        raise RuntimeError(f"exit code {code}\n{log.read_text()[-4000:]}")
    records = sorted((home / "runs/soak/ledger").glob("step_*.json"))
    return Soak(steps, samples, [json.loads(file.read_text())["metrics"]["time/step"] for file in records])


def plot(soak: Soak, file: Path) -> None:
    """Plots the memory of every process alive at the end, and the step time, over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 8), sharex=True, constrained_layout=True)
    for pid, usage in soak.samples[-1].processes.items():
        points = [(s.step, s.processes[pid].memory / 2**20) for s in soak.samples if pid in s.processes]
        above.plot(*zip(*points, strict=True), label=usage.name)
    above.set_ylabel("memory, MiB")
    above.set_yscale("log")
    above.legend(fontsize=6, ncols=3)
    below.plot([1000 * seconds for seconds in soak.seconds], linewidth=0.5)
    below.set_ylabel("step time, ms")
    below.set_xlabel("step")
    figure.savefig(file, dpi=110)


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table; growth beyond the limit is marked, unchanged counts are omitted."""
    lines = ["| quantity | early | late | growth | |", "|---|---|---|---|---|"]
    for row in rows:
        if not row.unit and row.early == row.late:
            continue
        early, late = (f"{value:,.{1 if row.unit else 0}f} {row.unit}".strip() for value in (row.early, row.late))
        lines.append(f"| {row.name} | {early} | {late} | {row.growth:+.1%} | {'GREW' if row.grew else ''} |")
    return "\n".join(lines)


def main() -> int:
    """Runs the soak test, prints the table and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("soak"))
    parser.add_argument("settings", nargs="*", metavar="a.b=value")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="soak") as home:
        soak = run(options.steps, Path(home), options.settings)
    (options.out / "soak.json").write_text(json.dumps(asdict(soak)))
    plot(soak, options.out / "soak.png")
    rows = judge(soak)
    print(table(rows))
    grown = [row.name for row in rows if row.grew]
    same = sum(not row.unit and row.early == row.late for row in rows)
    print(f"\n{same} counts of processes, threads, files, sockets and segments are unchanged.")
    print(f"{options.steps:,} steps: " + (f"grew: {', '.join(grown)}" if grown else "nothing grew"))
    return 1 if grown else 0


if __name__ == "__main__":
    raise SystemExit(main())
