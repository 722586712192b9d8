"""Measures how fast 4,096 trajectories that end at once are scored, and how busy two cores are.

python -m benchmarks.rewards [RESPONSES=4096 [PROGRAMS=100]]: scorer `math` on GSM8K-like solutions that need its
verifier, and a scorer that computes for 2 ms, each with one and with two scoring processes; none with RESPONSES=0.
`busy` is the CPU time of the scoring processes divided by wall time × two cores; `at work` is the share of their time
spent on a response, which is higher on a loaded machine. `scoring` is the time within scorers, `queueing` the mean
waiting time of a response.
Then PROGRAMS programs that print a number run one after another, alternately with and without namespaces; their CPU
time (user and system, of the program and its sandbox) depends less on other load than their wall time.
"""

import asyncio
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any, get_args

import psutil

from rl_core.config.reward import Isolation, RewardConfig
from rl_core.rewards.programs import run_program
from rl_core.rewards.runner import RewardRunner

CORES, WARM_UP = 2, 256
SCORERS = ("math", "benchmarks.rewards:computes")


@dataclass(frozen=True)
class Measured:
    """Seconds and shares of one call with all responses; `queueing` and `longest` refer to single responses."""

    wall: float
    busy: float
    at_work: float
    scoring: float
    queueing: float
    longest: float
    right: int


def computes(response: str, row: dict[str, Any]) -> float:
    """Keeps a core busy for 2 ms."""
    end, number = time.process_time() + 0.002, 0
    while time.process_time() < end:
        number += 1
    return float(number > 0)


def answer(number: int) -> str:
    """A typical model solution of about 300 characters."""
    steps = "".join(f"First we add {number} and {i}, which makes {number + i}. " for i in range(5))
    return f"{steps}So the answer is $\\boxed{{\\frac{{{number}}}{{2}}}}$."


async def measure(scorer: str, processes: int, responses: int) -> Measured:
    """Requests all scores at once, after a warm-up that starts the processes."""
    rows = [{"data_source": "gsm8k", "reward_model": {"ground_truth": str(i / 2)}} for i in range(responses)]
    async with RewardRunner(RewardConfig(function=scorer, processes=processes)) as runner:
        await asyncio.gather(*(runner.score(answer(i), rows[i]) for i in range(min(WARM_UP, responses))))
        children = [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]
        before, begin = cpu_seconds(children), time.perf_counter()

        async def one(i: int) -> tuple[float, float, float | None]:
            result = await runner.score(answer(i), rows[i])
            return time.perf_counter() - begin, result.seconds, result.score

        found = await asyncio.gather(*(one(i) for i in range(responses)))
        wall = time.perf_counter() - begin
        busy = (cpu_seconds(children) - before) / (wall * CORES)
    seconds = [each for _, each, _ in found]
    queueing = statistics.mean(waited - each for waited, each, _ in found)
    right = sum(score == 1.0 for *_, score in found)
    return Measured(wall, busy, sum(seconds) / (wall * processes), sum(seconds), queueing, max(seconds), right)


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Total CPU seconds of these processes so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def programs(count: int) -> dict[Isolation, list[tuple[float, float]]]:
    """CPU and wall seconds of each program by isolation."""
    seconds: dict[Isolation, list[tuple[float, float]]] = {isolation: [] for isolation in get_args(Isolation)}
    for _ in range(count):
        for isolation, times in seconds.items():
            cpu, begin = process_seconds(), time.perf_counter()
            assert run_program("print(1)", time.monotonic() + 60, isolation=isolation).output == "1\n"
            times.append((process_seconds() - cpu, time.perf_counter() - begin))
    return seconds


def process_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main(responses: int = 4096, count: int = 100) -> None:
    """Measures and prints the table."""
    names = ("wall s", "busy", "at work", "scoring s", "queueing s", "longest s", "right")
    print(f"{'scorer':28}{'processes':>10}" + "".join(f"{name:>12}" for name in names), flush=True)
    for scorer in SCORERS if responses else ():
        for processes in (1, 2):
            found = asyncio.run(measure(scorer, processes, responses))
            shares = f"{found.wall:12.2f}{found.busy:12.0%}{found.at_work:12.0%}"
            seconds = f"{found.scoring:12.2f}{found.queueing:12.2f}{found.longest:12.3f}"
            print(f"{scorer:28}{processes:10}{shares}{seconds}{found.right:12}", flush=True)
    for isolation, each in programs(count).items():
        for name, times in zip(("CPU", "wall"), zip(*each, strict=True), strict=True):
            text = f"median {statistics.median(times) * 1000:.1f} ms, least {min(times) * 1000:.1f} ms"
            print(f"a program, isolation={isolation}: {name} {text}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
