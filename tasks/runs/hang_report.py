"""Hang reports: what each part of a hung run waited for, since when, and its stacks."""

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
"""Number of innermost frames of this process in a message; the report has all of them."""


def write_hang_report(home: Path, run: str, status: Status, why: str) -> Path:
    """Writes a hang report: status, the reason `why`, and the stacks of this process; returns the file."""
    file = home / FOLDER / f"{re.sub('[^A-Za-z0-9._-]', '_', run)}-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", errors="replace") as report:
        report.write(f"run {run}, {status.doing}\n\n{why}\n\nthe run's own process, {os.getpid()}\n")
        report.flush()
        faulthandler.dump_traceback(report, all_threads=True)
    return file


def own_frames(thread: int) -> str:
    """The innermost frames of a thread of this process, in one line."""
    frame = sys._current_frames().get(thread)
    inner = reversed(traceback.extract_stack(frame)[-FRAMES:]) if frame else []
    return " < ".join(f"{each.name} ({os.path.basename(each.filename)}:{each.lineno})" for each in inner)
