"""Scorers that misbehave; scoring processes import this module by name."""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def by_response(response: str, row: dict[str, Any]) -> Any:
    """Do what the response says."""
    if response == "hang":
        while True:
            time.sleep(1)
    if response == "raise":
        raise RuntimeError("scorer \ud800 is broken")
    if response == "exit":
        sys.exit(3)
    if response == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "killed":  # once, as by the system when memory is short
        marker = Path(row["extra_info"]["marker"])
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0
    if response == "late":  # the process dies when it has no response to score
        signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return 1.0
    if response == "eat":
        return float(len(bytearray(2 << 30)))
    if response == "print":
        print("x" * 3_000_000, flush=True)
    if response == "many":
        return {"score": 1.0, **{f"reward {i}": 0.0 for i in range(100)}}
    if response.startswith("sleep"):
        time.sleep(float(response.split()[1]))
        return 1.0
    return {"nan": float("nan"), "inf": np.float32("inf"), "huge": 10**400, "text": "1", "true": True}.get(
        response, np.float32(0.5)
    )


def process(response: str, row: dict[str, Any]) -> float:
    time.sleep(0.005)
    return float(os.getpid())


COMPUTES_S = 0.0005


def computes(response: str, row: dict[str, Any]) -> dict[str, float]:
    """Keeps a core busy for half a millisecond."""
    end = time.process_time() + COMPUTES_S
    while time.process_time() < end:
        pass
    return {"score": 1.0, "process": float(os.getpid())}


def loaded(response: str, row: dict[str, Any]) -> float:
    """Whether a heavy module, or the tests' own main module, is loaded here."""
    return float("torch" in sys.modules or "transformers" in sys.modules or "pytest" in sys.modules)


def tell_and_hang(response: str, row: dict[str, Any]) -> float:
    Path(response).write_text(str(os.getpid()))
    time.sleep(600)
    return 1.0


async def told(response: str, row: dict[str, Any], trajectory: dict[str, Any]) -> float:
    """Writes the trajectory to a file that is called like the response; a point for each message."""
    await asyncio.sleep(0)
    (Path(row["folder"]) / response).write_text(json.dumps(trajectory))
    return float(len(trajectory["messages"]))


def lenient(response: str, row: dict[str, Any], strict: bool = False) -> dict[str, float]:
    """Takes no trajectory: its third argument is an option of its own."""
    return {"score": 1.0 - strict, "length": float(len(response))}


not_a_function = 3
