"""Diagnosis of ranks that do not answer: thread stacks, requested from outside while the rank hangs."""

import faulthandler
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_core.errors import Stalled

NAME = "stacks"
ANSWER_S, ELSEWHERE_S = 3.0, 20.0
"""Seconds for a process to write its stacks (needs no interpreter lock), and for another machine to return them."""
POLL = 0.1
FRAMES = 3
"""Frames per rank in the error message; the report has all of them."""
RANKS = 8
"""Ranks in the error message; the report has all of them."""
LIBRARIES, PACKAGE = re.compile(r"/lib/python3\.\d+/"), "/rl_core/"
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
# Frames directly below a rank's methods and its event loop's tasks, and the file of the frames of collectives.
BELOW, COLLECTIVES = {("host.py", "call"), ("events.py", "_run")}, "distributed_c10d.py"
# States of a process that cannot write its stacks.
SILENT = {
    psutil.STATUS_STOPPED: "is stopped by a signal",
    psutil.STATUS_TRACING_STOP: "is stopped by a debugger",
    psutil.STATUS_ZOMBIE: "has ended",
}


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank, and the file descriptor that its stacks are written to."""

    node: str
    address: str
    pid: int
    file: int


@dataclass(frozen=True)
class Seen:
    """Observation of a process: its stacks, or in `words` why there are none."""

    stacks: str
    words: str = ""


def offer_stacks() -> RankProcess:
    """Makes this process write the stacks of all threads on SIGUSR1, whatever it is doing."""
    file = os.memfd_create(NAME)  # vanishes with the process
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    return RankProcess(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid(), file)


def observe(rank: RankProcess) -> Seen:
    """Observes a process of this machine; takes a few seconds at most and never raises."""
    path = f"/proc/{rank.pid}/fd/{rank.file}"
    try:
        if NAME not in os.readlink(path):  # the pid has been reused
            return Seen("", "has ended")
        state = psutil.Process(rank.pid).status()
        if state in SILENT:
            return Seen("", SILENT[state])
        before = size = os.stat(path).st_size
        os.kill(rank.pid, signal.SIGUSR1)
        end = time.monotonic() + ANSWER_S
        while time.monotonic() < end:
            time.sleep(POLL)
            previous, size = size, os.stat(path).st_size
            if size == previous > before:
                break
        with open(path, errors="replace") as file:
            file.seek(before)
            stacks = file.read()
    except (OSError, psutil.Error):
        return Seen("", "has ended")
    return Seen(stacks, "" if stacks else f"did not write its stacks (state: {state})")


def observe_all(ranks: Mapping[int, RankProcess]) -> dict[int, Seen]:
    """Observes each rank's process, on any machine."""
    try:
        here = ray.get_runtime_context().get_node_id()
        requested = {number: _observe_elsewhere(rank) for number, rank in ranks.items() if rank.node != here}
        seen = {number: observe(rank) for number, rank in ranks.items() if rank.node == here}
        end = time.monotonic() + ELSEWHERE_S
        for number, ref in requested.items():
            try:
                seen[number] = ray.get(ref, timeout=max(end - time.monotonic(), POLL))
            except RayError as error:
                seen[number] = Seen("", f"is on a machine that does not respond: {error}")
        return seen
    except RayError as error:
        return {number: Seen("", f"cannot be queried: {error}") for number in ranks}


def _observe_elsewhere(rank: RankProcess) -> "ray.ObjectRef[Seen]":
    there = NodeAffinitySchedulingStrategy(rank.node, soft=False)
    options: Any = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
    return ray.remote(**options)(observe).remote(rank)


def stalled(
    name: str, method: str, late: Sequence[int], ranks: Sequence[RankProcess], deadline: float, since: float
) -> Stalled:
    """The error of a call made at `since` (seconds since 1970) that the ranks in `late` have not answered."""
    known = {rank: ranks[rank] for rank in late if rank < len(ranks)}
    seen = observe_all(known)
    # Ranks that only wait for others come last.
    order = sorted(known, key=lambda rank: (waits_for_others(seen[rank].stacks), rank))
    lines = [
        f"rank {rank} (process {known[rank].pid} on {known[rank].address}) {describe(seen[rank])}" for rank in order
    ]
    report = [f"{line}\n{seen[rank].stacks}" for rank, line in zip(order, lines, strict=True)]
    if len(lines) > RANKS:
        lines = [*lines[:RANKS], f"and {len(lines) - RANKS} more"]
    message = (
        f"{name}.{method} on rank(s) {list(late)} did not answer within {deadline:.0f} s (trainer.call_timeout_s), "
        f"called at {clock(since)}"
    )
    return Stalled("\n    ".join([message, *lines]), "\n\n".join([message, *report]))


def describe(seen: Seen) -> str:
    """Describes the observed state of a process."""
    if seen.words:
        return seen.words
    frames = method_frames(seen.stacks)
    if not frames:
        return "waits for the next call or awaits an operation in its event loop"
    inner, *outer = frames
    own = [frame for frame in outer if not LIBRARIES.search(frame[0])]
    shown = [f"{function} ({os.path.basename(file)}:{line})" for file, line, function in [inner, *own[: FRAMES - 1]]]
    waits = "waits for other ranks in" if waits_for_others(seen.stacks) else "is in"
    return f"{waits} {' < '.join(shown)}"


def method_frames(stacks: str) -> list[tuple[str, str, str]]:
    """File, line and function of each frame of the thread that runs the rank's method, innermost first."""
    threads = [
        [match.groups() for line in thread.splitlines() if (match := FRAME.match(line))]
        for thread in stacks.split("\n\n")
    ]
    for frames in threads:
        for depth, (file, _, function) in enumerate(frames):
            if (os.path.basename(file), function) in BELOW:
                return [(file, line, function) for file, line, function in frames[:depth]]
    # A compiled event loop, such as Ray's, has no frames.
    ours = next((frames for frames in threads if any(PACKAGE in file for file, _, _ in frames)), [])
    return [(file, line, function) for file, line, function in ours if os.path.basename(file) != "threading.py"]


def waits_for_others(stacks: str) -> bool:
    """Whether the rank's method is inside a collective."""
    return any(os.path.basename(file) == COLLECTIVES for file, _, _ in method_frames(stacks))


def clock(moment: float) -> str:
    """Formats seconds since 1970 as the local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(moment))
