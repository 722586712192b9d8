import asyncio
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError
from support_scoring import score_all
from support_scoring import scored as scored_by

from rl_core.config.schema import RewardConfig
from rl_core.errors import InputError
from rl_core.rewards.runner import CHUNKS_IN_FLIGHT, RewardResult, RewardRunner, check_scorers
from rl_core.rewards.worker import score_chunk

ROW = {"data_source": "exact", "reward_model": {"ground_truth": "1 2 3"}}


def runner(name: str | None = "by_response", **settings: Any) -> RewardRunner:
    function = f"scorers_for_tests:{name}" if name else None
    return RewardRunner(RewardConfig(**{"function": function, "timeout_s": 60.0, **settings}))


def scored(responses: list[str], name: str = "by_response", **settings: Any) -> list[RewardResult]:
    settings = {"function": f"scorers_for_tests:{name}", "timeout_s": 2.0, **settings}
    return scored_by(responses, [ROW] * len(responses), **settings)


def test_each_row_is_scored_by_its_source() -> None:
    rows = [ROW, ROW, {"data_source": "gsm8k", "reward_model": {"ground_truth": "7"}}]
    results = scored_by(["1 2 3", "3 2 1", "#### 7"], rows)
    assert results == [RewardResult(1.0, "ok"), RewardResult(0.0, "ok"), RewardResult(1.0, "ok")]


def test_failures_have_a_status_and_cost_no_other_response_its_score() -> None:
    # The first two are sent alone, the others in chunks, of which one hangs and one loses its process.
    responses = ["raise", "fine", "hang", "nan", "inf", "huge", "text", "true", "exit", "fine", "fine", "kill", "fine"]
    results = scored([*responses, *["fine"] * 20])
    results, again = results[: len(responses)], results[len(responses) :]
    assert [(r.score, r.status) for r in results] == [
        (None, "invalid"),
        (0.5, "ok"),
        (None, "timeout"),
        (None, "non_finite"),
        (None, "non_finite"),
        (None, "non_finite"),
        (None, "invalid"),
        (1.0, "ok"),
        (None, "invalid"),
        (0.5, "ok"),
        (0.5, "ok"),
        (None, "error"),
        (0.5, "ok"),
    ]
    details = dict(zip(responses, (r.detail for r in results), strict=True))
    assert "timeout_s=2" in details["hang"]
    assert "by_response" in details["raise"] and "is broken" in details["raise"]
    details["raise"].encode()  # can be written to a file
    assert "nan" in details["nan"]
    assert "returned '1'" in details["text"]
    assert "SystemExit: 3" in details["exit"]
    assert "exit code -9" in details["kill"]
    assert again == [RewardResult(0.5, "ok")] * 20
    seconds = dict(zip(responses, (r.seconds for r in results), strict=True))
    assert seconds["fine"] < 1.5 and 2 <= seconds["hang"] < 60


def test_a_process_that_is_killed_from_outside_costs_no_score(tmp_path: Path) -> None:
    row = {**ROW, "extra_info": {"marker": str(tmp_path / "killed")}}
    function = "scorers_for_tests:by_response"
    results = scored_by(["killed", "fine"], [row, row], function=function, timeout_s=60.0, processes=1)
    assert results == [RewardResult(1.0, "ok"), RewardResult(0.5, "ok")] and (tmp_path / "killed").exists()


def test_memory_and_rewards_of_a_scorer_are_limited() -> None:
    results = scored(["eat", "many", "fine"], memory_gb=1.5, timeout_s=20)
    assert [(result.score, result.status) for result in results] == [(None, "invalid"), (None, "invalid"), (0.5, "ok")]
    assert "MemoryError" in results[0].detail and "101 rewards" in results[1].detail


def test_what_scorers_print_is_limited(capfd: pytest.CaptureFixture[str]) -> None:
    assert scored(["print", "print", "fine"]) == [RewardResult(0.5, "ok")] * 3
    printed = capfd.readouterr().out
    assert printed.count("x") <= 1_000_000 and printed.count("is omitted") == 1


def test_further_scorers_are_weighted_added_and_named() -> None:
    further = ("scorers_for_tests:lenient=0.5", "exact=-2")
    row = {**ROW, "reward_model": {"ground_truth": "3"}}
    results = scored_by(["3", "4"], [row, row], function="numeric", extra_functions=further)
    assert results == [
        RewardResult(1 + 0.5 - 2, "ok", named={"lenient": 1.0, "length": 1.0, "exact": 1.0}),
        RewardResult(0 + 0.5 + 0, "ok", named={"lenient": 1.0, "length": 1.0, "exact": 0.0}),
    ]
    lost = scored(["raise", "fine"], "lenient", extra_functions=("scorers_for_tests:by_response=1",))
    assert [(result.score, result.status) for result in lost] == [(None, "invalid"), (1.5, "ok")]
    assert "by_response" in lost[0].detail and lost[1].named == {"length": 4.0, "by_response": 0.5}


def test_a_trajectory_goes_to_the_scorers_that_take_one() -> None:
    own = RewardConfig(function="scorers_for_tests:lenient", extra_functions=("scorers_for_tests:told=1",))
    assert RewardRunner(own).reads_trajectory(ROW)
    for other in ("scorers_for_tests:lenient", "scorers_for_tests:absent", "math", "exact", "builtins:max"):
        assert not RewardRunner(RewardConfig(function=other)).reads_trajectory(ROW)
    named = RewardConfig(sources=("mine=scorers_for_tests:told",))
    assert RewardRunner(named).reads_trajectory({**ROW, "data_source": "mine"})


def test_slow_but_timely_responses_all_get_their_score() -> None:
    # Behind two singles, chunks of two: the first is killed and scored one by one, the second ends early and goes on.
    responses = ["fine", "fine", "sleep 1.0", "sleep 1.9", "sleep 1.6", "sleep 0.1", *["fine"] * 4]
    results = scored(responses, timeout_s=2.5)
    assert results == [RewardResult(1.0 if "sleep" in each else 0.5, "ok") for each in responses]


def test_a_chunk_ends_early_when_its_time_is_used_up() -> None:
    chunk: list[Any] = [("exact", "1 2 3", ROW, None)] * 3
    assert len(score_chunk(chunk, budget_s=60)) == 3
    assert len(score_chunk(chunk, budget_s=-1)) == 1


def test_a_process_that_dies_between_responses_is_replaced() -> None:
    async def work() -> None:
        async with runner() as scoring:
            assert await scoring.score("late", ROW) == RewardResult(1.0, "ok")
            await asyncio.sleep(0.5)
            assert await score_all(scoring, ["fine"] * 8, [ROW] * 8) == [RewardResult(0.5, "ok")] * 8

    asyncio.run(work())


def test_two_processes_share_the_work_and_go_away() -> None:
    async def work() -> set[int]:
        async with runner("process", processes=2) as scoring:
            pids: set[int] = set()
            deadline = time.monotonic() + 60
            while len(pids) < 2 and time.monotonic() < deadline:
                pids |= {int(result.score or 0) for result in await score_all(scoring, [""] * 31, [ROW] * 31)}
        return pids

    pids = asyncio.run(work())
    assert len(pids) == 2 and os.getpid() not in pids
    assert not any(map(psutil.pid_exists, pids))
    results = scored(["hang", *["sleep 0.05"] * 30], processes=2)
    assert [r.status for r in results] == ["timeout", *["ok"] * 30]


def test_a_response_alone_is_scored_at_once_and_many_wait_in_few_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[int] = []

    async def work() -> None:
        async with runner(None) as scoring:
            run = scoring._processes.run

            async def noted(function: Any, chunk: list[Any], budget_s: float) -> Any:
                chunks.append(len(chunk))
                return await run(function, chunk, budget_s)

            monkeypatch.setattr(scoring._processes, "run", noted)
            await scoring.score("1", ROW)
            await score_all(scoring, ["1"] * 1000, [ROW] * 1000)

    asyncio.run(work())
    assert chunks[0] == 1 and max(chunks) == 64 and sum(chunks) == 1001 and len(chunks) < 50


def test_closing_ends_a_scorer_that_hangs() -> None:
    async def work() -> float:
        scoring = runner(timeout_s=600)
        await scoring.start()
        asked = asyncio.create_task(scoring.score("hang", ROW))
        await asyncio.sleep(0.5)
        start = time.monotonic()
        await scoring.close()
        asked.cancel()
        return time.monotonic() - start

    assert asyncio.run(work()) < 60
    assert not multiprocessing.active_children()


def test_a_scoring_process_loads_neither_torch_nor_the_main_module(tmp_path: Path) -> None:
    assert scored([""], "loaded") == [RewardResult(0.0, "ok")]
    program = (
        "from support_scoring import scored\n"
        "print('main is imported')\n"
        "if __name__ == '__main__':\n"
        "    print(scored(['1'], [{'reward_model': {'ground_truth': '1'}}], function='exact')[0].score)\n"
        "    assert __file__ == sys.argv[0]\n"
    )
    assert run_script(tmp_path / "program.py", program).stdout.splitlines() == ["main is imported", "1.0"]


def test_scoring_processes_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    program = (
        "import os, signal, threading, time\n"
        "from pathlib import Path\n"
        "from support_scoring import scored\n"
        "settings = dict(function='scorers_for_tests:tell_and_hang', timeout_s=600)\n"
        f"threading.Thread(target=scored, args=([{str(told)!r}], [{{}}]), kwargs=settings, daemon=True).start()\n"
        f"told = Path({str(told)!r})\n"
        "while not (told.exists() and told.read_text()):\n"
        "    time.sleep(0.02)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert run_script(tmp_path / "program.py", program).returncode == -9
    pid = int(told.read_text())
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)


def run_script(file: Path, program: str) -> "subprocess.CompletedProcess[str]":
    """Run a program as main module, with the project and this folder on its path."""
    here = Path(__file__).parents[1]
    file.write_text(f"import sys; sys.path[:0] = {[str(here.parent), str(here)]}\n{program}")
    return subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=300)


def test_many_small_responses_are_scored_quickly() -> None:
    text = "We add the two. " * 40 + "#### 18"
    rows = [{"data_source": "gsm8k", "prompt": "x" * 400, "reward_model": {"ground_truth": "18"}} for _ in range(512)]

    async def work() -> list[float]:
        times = []
        async with runner(None) as scoring:
            await score_all(scoring, [text] * 512, rows)
            processes = [psutil.Process(), *psutil.Process().children()]
            for _ in range(5):
                start = cpu_seconds(processes)
                await score_all(scoring, [f"{i} {text}" for i in range(512)], rows)
                times.append(cpu_seconds(processes) - start)
        return times

    assert min(asyncio.run(work())) < 0.12, "of CPU time, which other tests disturb less; 0.04 is usual, 0.2 one by one"


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """CPU time of these processes so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def test_thousands_at_once_keep_all_processes_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from scorers_for_tests import COMPUTES_S

    others = list[int]()
    """Chunks that the processes had when one ended."""

    async def work() -> tuple[float, list[RewardResult]]:
        async with runner("computes", processes=2) as scoring:
            await score_all(scoring, ["1"] * 64, [ROW] * 64)
            run, running = scoring._processes.run, 0

            async def noted(*of: Any) -> Any:
                nonlocal running
                running += 1
                result = await run(*of)
                running -= 1
                others.append(running)
                return result

            monkeypatch.setattr(scoring._processes, "run", noted)
            begun = time.process_time()
            results = await score_all(scoring, ["1"] * 4096, [ROW] * 4096)
            return time.process_time() - begun, results

    sending, results = asyncio.run(work())
    assert len(results) == 4096 and {(result.score, result.status) for result in results} == {(1.0, "ok")}
    # What holds beside other programs, too: both have work all the time, and handing out costs no more than scoring.
    shares = Counter(result.named["process"] for result in results)
    assert len(shares) == 2 and min(shares.values()) > 4096 / 16
    assert statistics.mean(others[: -CHUNKS_IN_FLIGHT * 2]) >= 2
    assert sending < 4096 * COMPUTES_S * 1.5, "CPU seconds, which rise by half beside other programs"


def test_unknown_scorers_are_found_before_scoring() -> None:
    rows = {"exact": "row 1", "exakt": "row 2"}
    check_scorers(RewardConfig(), {"exact": "row 1"})
    with pytest.raises(InputError, match="did you mean exact") as error:
        check_scorers(RewardConfig(), rows)
    assert "row 2" in error.value.where
    check_scorers(RewardConfig(function="scorers_for_tests:process"), rows)
    with pytest.raises(InputError, match="absent"):
        check_scorers(RewardConfig(function="scorers_for_tests:absent"), rows)
    with pytest.raises(InputError, match="did you mean exact") as error:
        check_scorers(RewardConfig(function="exact", extra_functions=("exakt=1",)), {})
    assert error.value.where == "reward.extra_functions"


def test_further_scorers_have_a_weight_and_a_name_of_their_own() -> None:
    for further, says in ((("exact",), "NAME=WEIGHT"), (("a:short=1", "b:short=1"), "distinct names")):
        with pytest.raises(ValidationError, match=says):
            RewardConfig(extra_functions=further)


def test_a_main_module_without_a_file_still_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `python -c`; Ray takes a name that is there for a text."""
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert scored(["fine"]) == [RewardResult(0.5, "ok")]
    assert not hasattr(sys.modules["__main__"], "__file__")
