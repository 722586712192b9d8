import io
import math
import os

import pytest

from rl_core.console import Console, duration
from rl_core.errors import InputError, TransientError

METRICS = {"reward/mean": 0.4123, "kl/rollout_k3": 0.00131, "response_length/mean": 5.94, "perf/tokens_per_s": 5210.4}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (0.84, "0.8s"), (9.94, "9.9s"), (9.96, "10s"), (42.4, "42s"), (59.6, "1m00s"), (92, "1m32s"),
        (3599.9, "1h00m"), (7500, "2h05m"), (3 * 86400 + 4 * 3600, "3d04h"), (-3, "0s"), (math.nan, "n/a"),
        (math.inf, "n/a"),
    ],
)  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_step_line_reads_as_documented() -> None:
    out = io.StringIO()
    Console(out).step(12, 150, METRICS, 92)
    words = out.getvalue().split()
    assert " ".join(words) == "step 12/150 reward 0.412 kl 0.0013 len 5.9 5,210 tok/s left 1m32s"


def test_columns_stay_in_place_whatever_the_numbers() -> None:
    out = io.StringIO()
    console = Console(out)
    console.step(1, 150, METRICS, 5)
    console.step(99, 150, {**METRICS, "reward/mean": math.nan, "kl/rollout_k3": math.inf}, 500)
    console.step(150, 150, {"reward/mean": -1.5, "response_length/mean": 1024.0, "perf/tokens_per_s": 123456.0}, 0)
    lines = out.getvalue().splitlines()
    for word in ("reward", "kl", "len", "tok/s", "left"):
        assert len({line.index(word) for line in lines}) == 1, word
    assert "reward    n/a" in lines[1] and "nan" not in out.getvalue() and "inf" not in out.getvalue()


def test_stages_table_and_error() -> None:
    out = io.StringIO()
    console = Console(out)
    console.stage("train", "steps 1–50")
    console.stage("register")
    console.note("version 1")
    console.done("train", 92, "50 steps")
    console.table([("score", "0.41 → 0.96"), ("commands", "one\ntwo")], "Result")
    console.error(InputError("a folder", "nothing", "/x", "make it"))
    console.failure(TransientError("engine lost"))
    assert out.getvalue().splitlines() == [
        "▸ train  steps 1–50", "▸ register", "  version 1", "✓ train  1m32s  50 steps", "", "Result",
        "  score     0.41 → 0.96", "  commands  one", "            two",
        "✗ error", "  expected: a folder", "      seen: nothing", "     where: /x", "       fix: make it",
        "✗ failed", "  engine lost",
    ]  # fmt: skip


def test_colour_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, terminal = io.StringIO(), Terminal()
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream in (plain, terminal):
        Console(stream).stage("train")
    assert "\x1b" not in plain.getvalue() and "\x1b[1mtrain\x1b[0m" in terminal.getvalue()


@pytest.mark.parametrize("escape", ["\x1b]0;owned\x07", "\x1b[2J", "\x9b2J", "\x1b[8m", "\r", "\x08", "\u202e"])
def test_foreign_text_cannot_control_the_terminal(escape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream in (io.StringIO(), Terminal()):
        console = Console(stream)
        console.note(escape)
        console.stage(escape, escape)
        console.table([(escape, escape)], escape)
        console.columns([("a", escape), (escape, "b")], escape)
        console.done(escape, 1, escape)
        console.finding("problem", escape, escape, escape)
        console.error(InputError(escape, escape, escape, escape))
        assert escape not in stream.getvalue()


def test_no_line_shows_credentials() -> None:
    out = io.StringIO()
    also: list[str] = []
    console = Console(out, also.append)
    console.note("GET https://me:hunter2@host failed")
    console.failure(ValueError(f"key hf_{'hunter2' * 6}"))
    console.table([("address", "https://host/?token=hunter2")], "Services")
    assert "hunter2" not in out.getvalue() + "".join(also) and out.getvalue().count("***") == 3


def test_every_line_is_flushed_and_no_encoding_ends_the_run() -> None:
    raw = io.BytesIO()
    log = io.TextIOWrapper(raw, encoding="ascii")
    Console(log).stage("train", "steps 1–50")
    assert raw.getvalue() == b"? train  steps 1?50\n"


def test_default_stream_is_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    Console().stage("train")
    assert capsys.readouterr().out == "▸ train\n"


def test_a_log_on_a_full_disk_does_not_end_the_run() -> None:
    with open("/dev/full", "w") as stream:
        console = Console(stream)
        console.note("there is no room for this")
        console.note("nor for this")


def test_a_reader_that_has_gone_does_not_end_the_run() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        console = Console(stream)
        console.note("nobody reads this")
        console.note("nor this")
