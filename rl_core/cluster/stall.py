"""What a rank is doing that does not answer: the stacks of its threads, asked for from outside while it hangs."""

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
# Seconds in which a process writes its stacks, which takes no lock of its interpreter, and in which another machine
# passes them on.
ANSWER_S, ELSEWHERE_S = 3.0, 20.0
POLL = 0.1
# Frames of a rank that the message of the error has; all of them are in its report.
FRAMES = 3
RANKS = 8
LIBRARIES, PACKAGE = re.compile(r"/lib/python3\.\d+/"), "/rl_core/"
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
# The frames that a rank's methods and its event loop's tasks are above, and the file of those in which it waits for
# other ranks.
BELOW, COLLECTIVES = {("worker_group.py", "call"), ("events.py", "_run")}, "distributed_c10d.py"
# States of a process that cannot say what it is doing.
SILENT = {
    psutil.STATUS_STOPPED: "is stopped by a signal",
    psutil.STATUS_TRACING_STOP: "is stopped by a debugger",
    psutil.STATUS_ZOMBIE: "has ended",
}


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank, and the number of the open file that gets its stacks."""

    node: str
    address: str
    pid: int
    file: int


@dataclass(frozen=True)
class Seen:
    """What was seen of a process: its stacks, or in words why there are none."""

    stacks: str
    words: str = ""


def offer_stacks() -> RankProcess:
    """Lets this process write the stacks of all its threads when it gets SIGUSR1, whatever it is doing then."""
    file = os.memfd_create(NAME)  # nothing is left of it when the process ends
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    return RankProcess(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid(), file)


def ask(rank: RankProcess) -> Seen:
    """What a process of this machine is doing; takes a few seconds at most and never raises."""
    path = f"/proc/{rank.pid}/fd/{rank.file}"
    try:
        if NAME not in os.readlink(path):  # the number belongs to another process by now
            return Seen("", "has ended")
        state = psutil.Process(rank.pid).status()
        if state in SILENT:
            return Seen("", SILENT[state])
        before = size = os.stat(path).st_size
        os.kill(rank.pid, signal.SIGUSR1)
        end = time.monotonic() + ANSWER_S
        while time.monotonic() < end:
            time.sleep(POLL)
            earlier, size = size, os.stat(path).st_size
            if size == earlier > before:
                break
        with open(path, errors="replace") as file:
            file.seek(before)
            stacks = file.read()
    except (OSError, psutil.Error):
        return Seen("", "has ended")
    return Seen(stacks, "" if stacks else f"does not say what it does (state: {state})")


def ask_all(ranks: Mapping[int, RankProcess]) -> dict[int, Seen]:
    """What each rank's process is doing, wherever it is."""
    try:
        here = ray.get_runtime_context().get_node_id()
        asked = {number: _ask_elsewhere(rank) for number, rank in ranks.items() if rank.node != here}
        seen = {number: ask(rank) for number, rank in ranks.items() if rank.node == here}
        end = time.monotonic() + ELSEWHERE_S
        for number, ref in asked.items():
            try:
                seen[number] = ray.get(ref, timeout=max(end - time.monotonic(), POLL))
            except RayError as error:
                seen[number] = Seen("", f"is on a machine that does not answer: {error}")
        return seen
    except RayError as error:
        return {number: Seen("", f"cannot be asked: {error}") for number in ranks}


def _ask_elsewhere(rank: RankProcess) -> "ray.ObjectRef[Seen]":
    there = NodeAffinitySchedulingStrategy(rank.node, soft=False)
    options: Any = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
    return ray.remote(**options)(ask).remote(rank)


def stalled(
    name: str, method: str, late: Sequence[int], ranks: Sequence[RankProcess], deadline: float, since: float
) -> Stalled:
    """The error of a call that was made at `since` (seconds since 1970) and that the ranks `late` have not answered."""
    known = {rank: ranks[rank] for rank in late if rank < len(ranks)}
    seen = ask_all(known)
    # Those who only wait for others come last.
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
    """What a process is doing, in words."""
    if seen.words:
        return seen.words
    frames = method_frames(seen.stacks)
    if not frames:
        return "waits for the next call, or awaits something in its event loop"
    inner, *outer = frames
    own = [frame for frame in outer if not LIBRARIES.search(frame[0])]
    shown = [f"{function} ({os.path.basename(file)}:{line})" for file, line, function in [inner, *own[: FRAMES - 1]]]
    waits = "waits for other ranks in" if waits_for_others(seen.stacks) else "is in"
    return f"{waits} {' < '.join(shown)}"


def method_frames(stacks: str) -> list[tuple[str, str, str]]:
    """File, line and function of the frames of the thread that does the rank's work, the innermost first."""
    threads = [
        [match.groups() for line in thread.splitlines() if (match := FRAME.match(line))]
        for thread in stacks.split("\n\n")
    ]
    for frames in threads:
        for depth, (file, _, function) in enumerate(frames):
            if (os.path.basename(file), function) in BELOW:
                return [(file, line, function) for file, line, function in frames[:depth]]
    # An event loop of compiled code, as Ray's, has no frames of its own.
    ours = next((frames for frames in threads if any(PACKAGE in file for file, _, _ in frames)), [])
    return [(file, line, function) for file, line, function in ours if os.path.basename(file) != "threading.py"]


def waits_for_others(stacks: str) -> bool:
    """Whether the rank's method is inside a collective."""
    return any(os.path.basename(file) == COLLECTIVES for file, _, _ in method_frames(stacks))


def clock(moment: float) -> str:
    """A moment (seconds since 1970) as the time of day."""
    return time.strftime("%H:%M:%S", time.localtime(moment))
