"""What a person sees in the terminal: plain lines that read as well in a log file."""

import math
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TextIO

from rl_core.errors import InputError
from rl_core.runtime.watchdog import progress

MAX_TEXT = 2000
_COLOUR = re.compile(r"\x1b\[\d*m")
_BOLD, _DIM, _GREEN, _RED, _YELLOW = "1", "2", "32", "31", "33"


def duration(seconds: float) -> str:
    """Seconds in words of at most two units: `0.8s`, `42s`, `1m32s`, `2h05m`, `3d04h`; `n/a` when not finite."""
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
    """Text that displays as it is: no control or direction-changing characters, and not endless."""
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]} … ({len(text) - MAX_TEXT:,} more characters)"
    hidden = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    return "".join(
        c if c in "\n\t" or (unicodedata.category(c) not in ("Cc", "Cs") and unicodedata.bidirectional(c) not in hidden)
        else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )  # fmt: skip


class Console:
    """Prints stages, one line a step, tables and errors; colour only on a terminal, every line flushed."""

    def __init__(self, stream: TextIO | None = None, also: Callable[[str], None] | None = None) -> None:
        """Lines go to `stream`, by default to the standard output of the moment, and without colour to `also`."""
        self._stream, self._also = stream or sys.stdout, also
        self._colour = self._stream.isatty() and "NO_COLOR" not in os.environ

    def stage(self, name: str, detail: str = "") -> None:
        """A stage begins: `▸ train  steps 1–50`."""
        self._line(f"{self._paint('▸', _GREEN)} {self._paint(name, _BOLD)}" + (f"  {detail}" if detail else ""))

    def done(self, name: str, seconds: float, detail: str = "") -> None:
        """A stage ended: `✓ train  1m32s  50 steps`."""
        line = f"{self._paint('✓', _GREEN)} {self._paint(name, _BOLD)}  {duration(seconds)}"
        self._line(line + (f"  {detail}" if detail else ""))

    def step(self, step: int, total: int, metrics: Mapping[str, float], seconds_left: float) -> None:
        """One training step; columns keep their width, a metric that is missing or not finite reads n/a."""
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
        """Names and values in two columns under a title; further lines of a value keep its column."""
        self._line("")
        self._line(self._paint(title, _BOLD))
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            first, *rest = value.split("\n")
            self._line(f"  {self._paint(name.ljust(width), _DIM)}  {first}")
            for line in rest:
                self._line(f"  {' ' * width}  {line}")

    def columns(self, rows: Sequence[Sequence[str]], title: str) -> None:
        """A table of several columns under a title; the first row names them."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)][1:]
        cells = ["  ".join(map(str.rjust, row[1:], widths)) for row in rows]
        self.table([(row[0], text) for row, text in zip(rows, cells, strict=True)], title)

    def note(self, text: str) -> None:
        """A remark inside a stage."""
        self._line(f"  {text}")

    def warning(self, error: InputError) -> None:
        """What a person may want to change."""
        self._print_error(self._paint("! warning", _YELLOW), error)

    def error(self, error: InputError) -> None:
        """What a person has to change: expected, seen, where and the fix."""
        self._print_error(self._paint("✗ error", _RED), error)

    def failure(self, error: Exception) -> None:
        """Why the run ended without a person's mistake."""
        self._print_error(self._paint("✗ failed", _RED), error)

    def finding(self, level: Literal["ok", "warning", "problem"], what: str, text: str, fix: str = "") -> None:
        """One thing that was looked at, and what to do about it."""
        sign, colour = {"ok": ("✓", _GREEN), "warning": ("!", _YELLOW), "problem": ("✗", _RED)}[level]
        self._line(
            f"{self._paint(f'{sign} {level}'.ljust(9), colour)}  {self._paint(what.ljust(16), _BOLD)}  {clean(text)}"
        )
        if fix:
            self._line(f"{' ' * 29}→ {clean(fix)}")

    def _print_error(self, how: str, error: Exception) -> None:
        self._line(how)
        for text in (str(error), *getattr(error, "__notes__", ())):
            for line in text.splitlines():
                self.note(clean(line))

    def _paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text

    def _line(self, text: str) -> None:
        progress()
        if self._also:
            self._also(_COLOUR.sub("", text))
        encoding = self._stream.encoding or "utf-8"
        # A terminal or log that is not UTF-8 shows `?` for a sign it lacks instead of ending the run.
        try:
            print(text.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)
        except OSError:  # whoever read has gone, or its disk is full, and the run goes on
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def _number(value: float | None, form: str, width: int) -> str:
    text = "n/a" if value is None or not math.isfinite(value) else format(value, form)
    return text.rjust(width)
