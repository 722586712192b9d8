"""What is kept of a run that hung: who waited for what since when, and the stacks of all that took part."""

import faulthandler
import os
import re
import sys
import time
import traceback
from pathlib import Path

from rl_core.storage.status import Status

FOLDER = "stalls"
FRAMES = 4
"""Innermost frames of this process that are told; all are in the file."""


def keep_stall(home: Path, run: str, status: Status, why: str) -> Path:
    """Writes the story with the stacks of this process at its end; returns where."""
    file = home / FOLDER / f"{re.sub('[^A-Za-z0-9._-]', '_', run)}-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", errors="replace") as kept:
        kept.write(f"run {run}, {status.doing}\n\n{why}\n\nthe run's own process, {os.getpid()}\n")
        kept.flush()
        faulthandler.dump_traceback(kept, all_threads=True)
    return file


def own_frames(thread: int) -> str:
    """The innermost frames of a thread of this process, in a line."""
    frame = sys._current_frames().get(thread)
    inner = reversed(traceback.extract_stack(frame)[-FRAMES:]) if frame else []
    return " < ".join(f"{each.name} ({os.path.basename(each.filename)}:{each.lineno})" for each in inner)
