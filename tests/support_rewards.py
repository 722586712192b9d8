"""Scorers of a user's own, found by their import path."""

import os
import time
from pathlib import Path
from typing import Any


def length(response: str, row: dict[str, Any]) -> float:
    """A tenth for each character, so that even an untrained model's rewards differ."""
    return len("".join(response.split())) / 10


def letters(response: str, row: dict[str, Any]) -> float:
    """A score from 0 to 0.9 that depends on every character of response and row, so that equal responses differ."""
    return sum(map(ord, response + str(row))) % 10 / 10


def named(response: str, row: dict[str, Any]) -> dict[str, float]:
    """The same score with two named rewards beside it."""
    characters = "".join(response.split())
    return {
        "score": len(characters) / 10,
        "kinds": len(set(characters)) / 10,
        "short": float(len(characters) < 4),
    }


def slow_when_told(response: str, row: dict[str, Any]) -> float:
    """The same score; it takes ten minutes once there is a file `slow` in the home folder."""
    if Path(os.environ["ROLLFORWARD_HOME"], "slow").exists():
        time.sleep(600)
    return length(response, row)
