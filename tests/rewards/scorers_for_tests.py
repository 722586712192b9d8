"""Scorers that misbehave; scoring processes import this module by name."""

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
    if response == "late":  # the process dies when it has no response to score
        signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return 1.0
    if response.startswith("sleep"):
        time.sleep(float(response.split()[1]))
        return 1.0
    return {"nan": float("nan"), "inf": np.float32("inf"), "huge": 10**400, "text": "1", "true": True}.get(
        response, np.float32(0.5)
    )


def process(response: str, row: dict[str, Any]) -> float:
    time.sleep(0.005)
    return float(os.getpid())


def loaded(response: str, row: dict[str, Any]) -> float:
    """Whether a heavy module, or the tests' own main module, is loaded here."""
    return float("torch" in sys.modules or "transformers" in sys.modules or "pytest" in sys.modules)


def tell_and_hang(response: str, row: dict[str, Any]) -> float:
    Path(response).write_text(str(os.getpid()))
    time.sleep(600)
    return 1.0


not_a_function = 3
