"""Terminal output: plain lines that are equally readable in a log file."""

import math
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TextIO

from rl_core.credentials import without_credentials
from rl_core.errors import InputError
from rl_core.runtime.watchdog import progress

MAX_TEXT = 2000
_COLOUR = re.compile(r"(\x1b\[(?:[012]|3[123])m)")
"""The colours of this module; all other control sequences come from foreign text."""
_BOLD, _DIM, _GREEN, _RED, _YELLOW = "1", "2", "32", "31", "33"


def duration(seconds: float) -> str:
    """Seconds formatted with at most two units: `0.8s`, `42s`, `1m32s`, `2h05m`, `3d04h`; `n/a` if not finite."""
    if not math.isfinite(seconds):
        return "n/a"
    if 0 < seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = max(0, round(seconds))
    for large, small, unit, part in ((86400, 3600, "d", "h"), (3600, 60, "h", "m"), (60, 1, "m", "s")):
        if whole >= large:
            return f"{whole // large}{unit}{whole % large // small:02d}{part}"
    return f"{whole}s"


def clean(text: str) -> str:
    """Text safe to display: control and bidirectional characters are replaced, the length is limited to MAX_TEXT."""
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]} … ({len(text) - MAX_TEXT:,} more characters)"
    return _printable(text)


def _printable(text: str) -> str:
    hidden = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    return "".join(
        c if c in "\n\t" or (unicodedata.category(c) not in ("Cc", "Cs") and unicodedata.bidirectional(c) not in hidden)
        else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )  # fmt: skip


class Console:
    """Prints stages, one line per step, tables and errors; coloured only on a terminal, flushed after every line."""

    def __init__(self, stream: TextIO | None = None, also: Callable[[str], None] | None = None) -> None:
        """Prints to `stream` (default: `sys.stdout` at construction) and passes each line without colour to `also`."""
        self._stream, self._also = stream or sys.stdout, also
        self._colour = self._stream.isatty() and "NO_COLOR" not in os.environ

    def stage(self, name: str, detail: str = "") -> None:
        """Prints the start of a stage: `▸ train  steps 1–50`."""
        self._line(f"{self._paint('▸', _GREEN)} {self._paint(name, _BOLD)}" + (f"  {detail}" if detail else ""))

    def done(self, name: str, seconds: float, detail: str = "") -> None:
        """Prints the end of a stage: `✓ train  1m32s  50 steps`."""
        line = f"{self._paint('✓', _GREEN)} {self._paint(name, _BOLD)}  {duration(seconds)}"
        self._line(line + (f"  {detail}" if detail else ""))

    def step(self, step: int, total: int, metrics: Mapping[str, float], seconds_left: float) -> None:
        """Prints one training step in columns of fixed width; a missing or non-finite metric is shown as n/a."""
        width = len(str(total))
        fields = (
            f"step {step:>{width}}/{total}",
            f"reward {_number(metrics.get('reward/mean'), '.3f', 6)}",
            f"kl {_number(metrics.get('kl/ref', metrics.get('kl/rollout_k3')), '.4f', 7)}",
            f"len {_number(metrics.get('response_length/mean'), '.1f', 6)}",
            f"{_number(metrics.get('perf/tokens_per_s'), ',.0f', 7)} tok/s",
            f"left {duration(seconds_left)}",
        )
        self._line("  " + "  ".join(fields))

    def table(self, rows: Sequence[tuple[str, str]], title: str) -> None:
        """Prints names and values in two columns under a title; continuation lines of a value are indented to it."""
        self._line("")
        self._line(self._paint(title, _BOLD))
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            first, *rest = value.split("\n")
            self._line(f"  {self._paint(name.ljust(width), _DIM)}  {first}")
            for line in rest:
                self._line(f"  {' ' * width}  {line}")

    def columns(self, rows: Sequence[Sequence[str]], title: str) -> None:
        """Prints a table of several columns under a title; the first row is the header."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)][1:]
        cells = ["  ".join(map(str.rjust, row[1:], widths)) for row in rows]
        self.table([(row[0], text) for row, text in zip(rows, cells, strict=True)], title)

    def note(self, text: str) -> None:
        """Prints a line within a stage."""
        self._line(f"  {text}")

    def warning(self, error: InputError) -> None:
        """Prints a warning: expected, seen, where and fix."""
        self._print_error(self._paint("! warning", _YELLOW), error)

    def error(self, error: InputError) -> None:
        """Prints a user error: expected, seen, where and fix."""
        self._print_error(self._paint("✗ error", _RED), error)

    def failure(self, error: Exception) -> None:
        """Prints a failure that is not a user error."""
        self._print_error(self._paint("✗ failed", _RED), error)

    def finding(self, level: Literal["ok", "warning", "problem"], what: str, text: str, fix: str = "") -> None:
        """Prints the result of one check and how to fix it."""
        sign, colour = {"ok": ("✓", _GREEN), "warning": ("!", _YELLOW), "problem": ("✗", _RED)}[level]
        self._line(
            f"{self._paint(f'{sign} {level}'.ljust(9), colour)}  {self._paint(what.ljust(16), _BOLD)}  {clean(text)}"
        )
        if fix:
            self._line(f"{' ' * 29}→ {clean(fix)}")

    def _print_error(self, heading: str, error: Exception) -> None:
        self._line(heading)
        for text in (str(error), *getattr(error, "__notes__", ())):
            for line in text.splitlines():
                self.note(clean(line))

    def _paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text

    def _line(self, text: str) -> None:
        progress()
        parts = _COLOUR.split(text) if self._colour else [text]
        text = "".join(part if i % 2 else _printable(without_credentials(part)) for i, part in enumerate(parts))
        if self._also:
            self._also(_COLOUR.sub("", text))
        encoding = self._stream.encoding or "utf-8"
        # Output that is not UTF-8 gets `?` for characters it cannot encode, instead of an exception.
        try:
            print(text.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)
        except OSError:  # the reader is gone or the disk is full: discard further output and continue the run
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def _number(value: float | None, form: str, width: int) -> str:
    text = "n/a" if value is None or not math.isfinite(value) else format(value, form)
    return text.rjust(width)
