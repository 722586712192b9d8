"""What the command prints last, and its exit code, whatever has ended it."""

import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from prefect.exceptions import TerminationSignal
from support_flows import COMMAND, environment

from flows import attempts, post_train, preflight
from flows.cli import main as cli
from flows.cli import run as runs
from rl_core.config.compose import compose

WAY = "rollforward run demo --run x"


def ended(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def command(*_: Any) -> int:
        raise error

    monkeypatch.setattr(cli, "_parse", lambda _: Namespace(command=command, resume_hint=WAY))
    return cli.main([])


@pytest.mark.parametrize(
    ("error", "code"), [(KeyError("nobody foresaw this"), 1), (KeyboardInterrupt(), 130), (runs.Terminated(), 143)]
)
def test_the_way_back_is_printed_last(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(error, monkeypatch) == code
    shown = capsys.readouterr()
    assert shown.out.rstrip().endswith(WAY)
    assert ("nobody foresaw this" in shown.err) == (code == 1)


def test_a_sigterm_that_prefect_could_not_pass_on_is_one(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flows import pipeline

    def told_to_stop(*_: Any) -> None:
        raise TerminationSignal(signal=15)

    monkeypatch.setenv("ROLLFORWARD_HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setattr(pipeline, "run_as_flow", told_to_stop)
    monkeypatch.setattr(runs, "start_guardian", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    assert cli.main(["run", "demo", "--run", "x"]) == 143
    assert "stopped at step 0 of 200" in capsys.readouterr().out


@pytest.mark.parametrize("number", [1, 2])
def test_a_flow_run_that_is_started_again_keeps_its_rows(
    number: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import pipeline

    seen: dict[str, Any] = {}
    monkeypatch.setattr(preflight, "preflight", lambda *_, **__: None)
    monkeypatch.setattr(pipeline, "run_stages", lambda run, **options: seen.update(options) or run.close() or {})
    home = tmp_path_factory.mktemp("home")
    post_train.run_attempt(attempts.Attempt(home, "0123456789", number), compose("demo"), None, None)
    assert seen["keep_data"] == (number > 1)


@pytest.mark.parametrize("content", [b'{"prefect": {"pro', b"[]", b'{"prefect": {}}', b"[" * 100_000, b"\xff"])
@pytest.mark.parametrize("words", [["models"], ["down"]])
def test_a_torn_list_of_services_is_a_user_error(
    content: bytes,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ROLLFORWARD_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "services.json").write_bytes(content)
    assert cli.main(words) == 2
    printed = "".join(capsys.readouterr())
    assert str(tmp_path / "services.json") in printed and "Traceback" not in printed


def test_output_that_a_full_disk_cuts_off_is_a_failure(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [COMMAND, "config", "demo"], env=environment(tmp_path), stdout=full, timeout=300, check=False
        )
    assert done.returncode == 1
