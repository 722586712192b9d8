"""The commands that show runs: what they tell of running, ended, dead and damaged ones."""

import json
import re
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path

import pytest
from support_runs import make_run

from flows.cli.main import main
from rl_core.storage.status import StatusWriter
from rl_core.storage.store import Store

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLFORWARD_HOME", str(tmp_path))
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.fixture
def command(home: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*words: str) -> tuple[int, str]:
        code = main(words)
        return code, capsys.readouterr().out

    return run


def working(store: Store, stage: str = "train") -> StatusWriter:
    writer = StatusWriter(store, steps=4, step=2)
    writer.stage(stage)
    writer.update(seconds_per_step=90.0, reward=0.5)
    writer._write()  # now, not in a moment
    return writer


def test_the_files_of_a_shared_run_cannot_control_the_terminal(home: Path, command: Command) -> None:
    store = make_run(home, "shared", steps=1)
    working(store).close("failed", "\x1b]0;owned\x07\x1b[2J")
    store.write_json("run.json", store.read_json("run.json") | {"recipe": "\x1b[2Jdemo\x9b8m"})
    for words in (["runs"], ["status", "shared"], ["runs", "--json"], ["compare", "shared", "shared"]):
        code, text = command(*words)
        assert code == 0 and text and not set(text) & {"\x1b", "\x07", "\x9b"}


def test_runs_lists_each_with_its_state(home: Path, command: Command) -> None:
    working(make_run(home, "ended")).close("finished")
    working(make_run(home, "broken", steps=1)).close("failed", "canary")
    make_run(home, "old", steps=3)
    (home / "runs/torn").mkdir()
    (home / "runs/torn/run.json").write_text("{")
    writer = working(make_run(home, "busy", steps=2))
    code, text = command("runs")
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith("  ")}
    assert code == 0 and list(rows)[:2] == ["run", "busy"]
    assert rows["busy"][:5] == ["demo", "2/4", "0.500", "running", f"({writer.status.pid})"]
    assert rows["ended"][:4] == ["demo", "4/4", "0.400", "finished"]
    assert rows["broken"][:4] == ["demo", "1/4", "0.100", "failed"]
    assert rows["old"][:4] == ["demo", "3/4", "0.300", "stopped"]
    assert "damaged" in rows["torn"]
    states = {run["name"]: run["state"] for run in json.loads(command("runs", "--json")[1])}
    assert states == {"busy": "running", "ended": "finished", "broken": "failed", "old": "stopped", "torn": "damaged"}
    writer.close("stopped")


def test_status_shows_the_newest_run_and_who_waits(home: Path, command: Command) -> None:
    make_run(home, "older")
    writer = working(make_run(home, "busy", steps=2))
    writer.phase(3, "push")
    writer._write()
    code, text = command("status")
    assert code == 0 and "Run busy" in text
    for words in (f"process {writer.status.pid}", "2/4", "1m30s per step", "3m00s", "train, for", "step 3, push",
                  "the rollout engines wait for the new weights"):  # fmt: skip
        assert words in text, words
    assert json.loads(command("status", "busy", "--json")[1])["seconds_left"] == 180.0
    writer.close("failed", "out of memory")
    code, text = command("status", "busy", "--watch")
    assert code == 0 and "failed" in text and "out of memory" in text and "time left" not in text


def test_runs_elsewhere_are_named_by_root_or_by_url(home: Path, command: Command) -> None:
    store = Store("memory://elsewhere/runs")
    made = make_run(home, "kept", "storage.root=memory://elsewhere/runs")
    assert made.url == "memory:///elsewhere/runs/kept"
    assert "kept" in command("runs", "--root", store.url)[1] and "kept" not in command("runs")[1]
    assert "4/4" in command("status", "kept", "--root", store.url)[1]
    code, text = command("report", made.url)
    assert code == 0 and (home / "reports/kept.html").is_file() and str(home / "reports/kept.html") in text


def test_a_missing_run_is_an_error_that_lists_those_there_are(home: Path, command: Command) -> None:
    assert command("status")[0] == 2
    make_run(home, "there")
    code, text = command("report", "their")
    assert code == 2 and "use one of: there" in text


def test_report_of_an_unfinished_run_is_made_of_what_is_committed(home: Path, command: Command) -> None:
    store = make_run(home, "busy", "actor.optim.lr=0.25", steps=2)
    writer = working(store)
    code, text = command("report", "busy")
    page = (home / "reports/busy.html").read_text()
    assert code == 0 and "(run not finished)" in text
    for words in ("2 of 4", "Score and reward", "actor.optim.lr", "0.25", "<td>override</td>"):
        assert words in page, words
    store.write_bytes("report.html", b"made by the run")
    assert "reports/busy.html" in command("report", "busy")[1]  # the run goes on: that one is of an earlier end
    writer.close("finished")
    assert f"{home}/runs/busy/report.html" in command("report", "busy")[1]
    assert not store.exists("reports")


def test_report_opens_where_there_is_a_display(home: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(home, "there", steps=2)
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    command("report", "there")
    assert opened == []
    monkeypatch.setenv("DISPLAY", ":0")
    command("report", "there")
    assert opened == [(home / "reports/there.html").as_uri()]


def test_compare_shows_what_differs_and_both_curves(home: Path, command: Command, tmp_path: Path) -> None:
    make_run(home, "one")
    make_run(home, "two", "actor.optim.lr=0.25", "rollout.n=4", steps=3, gain=0.2)
    code, text = command("compare", "one", "two", "--html", str(tmp_path / "both.html"))
    assert code == 0, text
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if line.startswith("  ")}
    assert lines["actor.optim.lr"].endswith(" 0.25") and lines["rollout.n"].endswith(" 4")
    assert "trainer.seed" not in text
    assert lines["greedy"] == "0.650 0.250" and lines["reward/mean"] == "0.1 → 0.4 0.2 → 0.6"
    page = (tmp_path / "both.html").read_text()
    assert page.count("<svg") == 2 and re.findall(r"</i>(\w+)</span>", page) == ["one", "two"] * 2
    assert command("compare", "one", "three")[0] == 2
