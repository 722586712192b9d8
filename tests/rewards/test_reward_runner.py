import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_core.config.schema import RewardConfig
from rl_core.errors import InputError
from rl_core.rewards.runner import RewardResult, RewardRunner, check_scorers
from rl_core.rewards.worker import score_chunk

ROW = {"data_source": "exact", "reward_model": {"ground_truth": "1 2 3"}}


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        yield


def runner(name: str | None = "by_response", **settings: Any) -> RewardRunner:
    function = f"scorers_for_tests:{name}" if name else None
    return RewardRunner(RewardConfig(**{"function": function, "timeout_s": 1.0, **settings}))


def test_each_row_is_scored_by_its_source() -> None:
    rows = [ROW, ROW, {"data_source": "gsm8k", "reward_model": {"ground_truth": "7"}}]
    with runner(None) as scoring:
        results = scoring.score(["1 2 3", "3 2 1", "#### 7"], rows)
        assert scoring.score([], []) == []
    assert results == [RewardResult(1.0, "ok"), RewardResult(0.0, "ok"), RewardResult(1.0, "ok")]


def test_failures_have_a_status_and_cost_no_other_response_its_score() -> None:
    responses = ["fine", "hang", "raise", "nan", "inf", "huge", "text", "true", "exit", "kill", "fine"]
    with runner() as scoring:
        results = scoring.score(responses, [ROW] * len(responses))
        again = scoring.score(["fine"], [ROW])
    assert [(r.score, r.status) for r in results] == [
        (0.5, "ok"),
        (None, "timeout"),
        (None, "error"),
        (None, "non_finite"),
        (None, "non_finite"),
        (None, "non_finite"),
        (None, "error"),
        (1.0, "ok"),
        (None, "error"),
        (None, "error"),
        (0.5, "ok"),
    ]
    details = dict(zip(responses, (r.detail for r in results), strict=True))
    assert "timeout_s=1" in details["hang"]
    assert "by_response" in details["raise"] and "is broken" in details["raise"]
    details["raise"].encode()  # can be written to a file
    assert "nan" in details["nan"]
    assert "returned '1'" in details["text"]
    assert "SystemExit: 3" in details["exit"]
    assert "exit code -9" in details["kill"]
    assert again == [RewardResult(0.5, "ok")]


def test_slow_but_timely_responses_all_get_their_score() -> None:
    # Chunks of two: the first is killed and scored one by one, the second ends early and is continued.
    responses = ["sleep 0.6", "sleep 1.0", "sleep 1.0", "sleep 0.1", "fine"]
    with runner(timeout_s=1.5) as scoring:
        results = scoring.score(responses, [ROW] * 5)
    assert results == [RewardResult(1.0, "ok")] * 4 + [RewardResult(0.5, "ok")]


def test_a_chunk_ends_early_when_its_time_is_used_up() -> None:
    names, responses, rows = ["exact"] * 3, ["1 2 3"] * 3, [ROW] * 3
    assert len(score_chunk(names, responses, rows, budget_s=60)) == 3
    assert len(score_chunk(names, responses, rows, budget_s=-1)) == 1


def test_a_process_that_dies_between_responses_is_replaced() -> None:
    with runner() as scoring:
        assert scoring.score(["late"], [ROW]) == [RewardResult(1.0, "ok")]
        time.sleep(0.5)
        assert scoring.score(["fine"] * 8, [ROW] * 8) == [RewardResult(0.5, "ok")] * 8


def test_two_processes_share_the_work_and_go_away() -> None:
    responses = ["hang", *["sleep 0.05"] * 30]
    with runner("process", processes=2) as scoring:
        pids: set[int] = set()
        deadline = time.monotonic() + 20
        while len(pids) < 2 and time.monotonic() < deadline:
            pids |= {int(result.score or 0) for result in scoring.score(responses, [ROW] * 31)}
    assert len(pids) == 2 and os.getpid() not in pids
    assert not any(map(psutil.pid_exists, pids))
    with runner(processes=2) as scoring:
        results = scoring.score(responses, [ROW] * 31)
    assert [r.status for r in results] == ["timeout", *["ok"] * 30]


def test_closing_ends_a_scorer_that_hangs() -> None:
    scoring = runner(timeout_s=600)
    scoring._submit([0], ["scorers_for_tests:by_response"], ["hang"], [ROW])
    time.sleep(0.5)
    start = time.monotonic()
    scoring.close()
    assert time.monotonic() - start < 5
    assert not multiprocessing.active_children()


def test_a_scoring_process_loads_neither_torch_nor_the_main_module(tmp_path: Path) -> None:
    with runner("loaded") as scoring:
        assert scoring.score([""], [ROW]) == [RewardResult(0.0, "ok")]
    program = (
        "from rl_core.rewards.runner import RewardRunner, RewardConfig\n"
        "print('main is imported')\n"
        "if __name__ == '__main__':\n"
        "    with RewardRunner(RewardConfig(function='exact')) as scoring:\n"
        "        print(scoring.score(['1'], [{'reward_model': {'ground_truth': '1'}}]))\n"
        "    assert __file__ == sys.argv[0]\n"
    )
    done = run_script(tmp_path / "program.py", program)
    assert done.stdout.splitlines() == ["main is imported", str([RewardResult(1.0, "ok")])]


def test_scoring_processes_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    program = (
        "import os, signal, threading, time\n"
        "from pathlib import Path\n"
        "from rl_core.rewards.runner import RewardRunner, RewardConfig\n"
        "scoring = RewardRunner(RewardConfig(function='scorers_for_tests:tell_and_hang', timeout_s=600))\n"
        f"threading.Thread(target=scoring.score, args=([{str(told)!r}], [{{}}]), daemon=True).start()\n"
        f"told = Path({str(told)!r})\n"
        "while not (told.exists() and told.read_text()):\n"
        "    time.sleep(0.02)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert run_script(tmp_path / "program.py", program).returncode == -9
    pid = int(told.read_text())
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def run_script(file: Path, program: str) -> "subprocess.CompletedProcess[str]":
    """Run a program as main module, with the project and this folder on its path."""
    here = Path(__file__).parent
    file.write_text(f"import sys; sys.path[:0] = {[str(here.parent.parent), str(here)]}\n{program}")
    return subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=60)


def test_many_small_responses_are_scored_quickly() -> None:
    text = "We add the two. " * 40 + "#### 18"
    rows = [{"data_source": "gsm8k", "prompt": "x" * 400, "reward_model": {"ground_truth": "18"}} for _ in range(512)]
    with runner(None) as scoring:
        scoring.score([text] * 512, rows)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            scoring.score([f"{i} {text}" for i in range(512)], rows)
            times.append(time.perf_counter() - start)
    assert min(times) < 0.06


def test_unknown_scorers_are_found_before_scoring() -> None:
    rows = {"exact": "row 1", "exakt": "row 2"}
    check_scorers(RewardConfig(), {"exact": "row 1"})
    with pytest.raises(InputError, match="did you mean exact") as error:
        check_scorers(RewardConfig(), rows)
    assert "row 2" in error.value.where
    check_scorers(RewardConfig(function="scorers_for_tests:process"), rows)
    with pytest.raises(InputError, match="absent"):
        check_scorers(RewardConfig(function="scorers_for_tests:absent"), rows)


def test_rows_and_responses_must_match() -> None:
    with runner() as scoring, pytest.raises(ValueError, match="1 responses for 2 rows"):
        scoring.score(["fine"], [ROW, ROW])


def test_a_main_module_without_a_file_still_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `python -c`; Ray takes a name that is there for a text."""
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    with runner("by_response"):
        pass
    assert not hasattr(sys.modules["__main__"], "__file__")
