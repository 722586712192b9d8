import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_core.config.schema import AgentConfig
from rl_core.errors import InputError, TransientError
from rl_core.rollout.agent.tool_runner import Toolbox, ToolOutcome, ToolRunner, tool_schemas
from rl_core.rollout.agent.toolbox import MAX_TEXT, ToolFailure, tools_of_row

HERE = Path(__file__).parents[2]


def config(*tools: str, **settings: Any) -> AgentConfig:
    names = [name if name == "calculator" else f"tools_for_tests:{name}" for name in tools]
    return AgentConfig(**{"tools": names, "tool_timeout_s": 1.0, **settings})


def with_tools(
    tools: AgentConfig,
    work: Callable[[ToolRunner, Toolbox], Coroutine[Any, Any, Any]],
    row: dict[str, Any] | None = None,
) -> Any:
    """What the work returns; afterwards no process is left."""

    async def run() -> Any:
        async with ToolRunner(tools) as runner:
            found = await work(runner, await runner.open(row or {}))
        assert not pool_processes()
        return found

    return asyncio.run(run())


def pool_processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]


def outcomes(calls: list[tuple[str, Any]], tools: AgentConfig, row: dict[str, Any] | None = None) -> list[ToolOutcome]:
    """Outcomes of calls that follow each other."""

    async def work(runner: ToolRunner, toolbox: Toolbox) -> list[ToolOutcome]:
        return [await toolbox.call(*call) for call in calls]

    found: list[ToolOutcome] = with_tools(tools, work, row)
    return found


def row_with(**tools_kwargs: Any) -> dict[str, Any]:
    return {"extra_info": {"tools_kwargs": tools_kwargs}}


def test_every_call_ends_with_a_status_and_a_text_for_the_policy() -> None:
    calls: list[tuple[str, Any]] = [
        ("calculator", {"x": "2*(3+4)"}),
        ("calculator", {"x": "1/0"}),
        ("calculater", {"x": "1"}),
        ("calculator", {"y": "1"}),
        ("calculator", "2+2"),
        ("misbehave", {"how": "raise"}),
        ("misbehave", {"how": "refuse"}),
        ("misbehave", {"how": "exit"}),
        ("misbehave", {"how": "system exit"}),
        ("misbehave", {"how": "sleep"}),
        ("misbehave", {"how": "fine"}),
    ]
    found = outcomes(calls, config("calculator", "misbehave"))
    assert [(outcome.status, outcome.text) for outcome in found] == [
        ("ok", "14"),
        ("error", "Error: division by zero"),
        ("unknown_tool", "Error: there is no tool 'calculater'; the tools are calculator, misbehave"),
        ("bad_arguments", "Error: argument 'x': Field required; argument 'y': Extra inputs are not permitted"),
        ("bad_arguments", "Error: the arguments must be a JSON object"),
        ("error", "Error: RuntimeError: tool \\ud800 is broken"),
        ("error", "Error: no such page"),
        ("error", "Error: its process died with exit code 3"),
        ("error", "Error: SystemExit: 3"),
        ("timeout", "Error: no answer within 1 s"),
        ("ok", "fine"),
    ]
    assert "in misbehave" in found[5].detail and not found[0].detail
    assert 1.0 <= found[9].seconds < 3.0


@pytest.mark.parametrize("how", ["sleep", "loop"])
def test_a_call_that_never_ends_is_killed_and_harms_no_other(how: str) -> None:
    async def work(runner: ToolRunner, toolbox: Toolbox) -> list[ToolOutcome]:
        innocent = [toolbox.call("nap", {"seconds": 0.1}) for _ in range(8)]
        return await asyncio.gather(toolbox.call("misbehave", {"how": how}), *innocent)

    killed, *others = with_tools(config("misbehave", "nap", tool_processes=2), work)
    assert killed.status == "timeout" and killed.seconds < 3.0
    assert [other.status for other in others] == ["ok"] * 8


def test_a_process_that_dies_costs_only_its_own_call() -> None:
    async def work(runner: ToolRunner, toolbox: Toolbox) -> list[ToolOutcome]:
        innocent = [toolbox.call("nap", {"seconds": 0.1}) for _ in range(8)]
        return await asyncio.gather(toolbox.call("misbehave", {"how": "exit"}), *innocent)

    dead, *others = with_tools(config("misbehave", "nap", tool_processes=2), work)
    assert dead.status == "error"
    assert [other.status for other in others] == ["ok"] * 8


def test_calls_run_at_the_same_time_over_all_processes() -> None:
    async def work(runner: ToolRunner, toolbox: Toolbox) -> tuple[float, set[str]]:
        while len(pids := {o.text for o in await asyncio.gather(*(nap(toolbox, 0.1) for _ in range(8)))}) < 4:
            pass
        begin = time.monotonic()
        await asyncio.gather(*(nap(toolbox, 0.3) for _ in range(16)))
        return time.monotonic() - begin, pids

    def nap(toolbox: Toolbox, seconds: float) -> Coroutine[Any, Any, ToolOutcome]:
        return toolbox.call("nap", {"seconds": seconds})

    seconds, pids = with_tools(config("nap", tool_processes=4), work)
    assert 1.2 <= seconds < 3, "one after the other they take 4.8 s"
    assert str(os.getpid()) not in pids


def test_a_tool_keeps_its_state_over_calls_and_is_as_before_after_one_that_failed() -> None:
    entries = ["a", "raise", "sleep", "b"]
    found = outcomes([("diary", {"entry": entry}) for entry in entries], config("Diary"))
    assert [(outcome.status, outcome.text) for outcome in found[::3]] == [("ok", "2"), ("ok", "3")]
    assert [outcome.status for outcome in found[1:3]] == ["error", "timeout"]
    assert found[0].reward == 0.25 and found[1].reward == 0.0


def test_trajectories_share_no_state_and_calls_of_one_follow_each_other() -> None:
    async def work(runner: ToolRunner, first: Toolbox) -> list[list[str]]:
        boxes = [first, await runner.open({})]
        every = [asyncio.gather(*(box.call("diary", {"entry": "x"}) for _ in range(4))) for box in boxes]
        return [[outcome.text for outcome in await calls] for calls in every]

    assert with_tools(config("Diary", tool_processes=2), work) == [["2", "3", "4", "5"]] * 2


def test_the_methods_of_a_tool_are_called_in_order_with_the_kwargs_of_the_row(tmp_path: Path) -> None:
    file = tmp_path / "entries"
    kwargs = {
        "create_kwargs": {"answer": 7, "unset": None, "nested": {"a": None, "b": [None, {"c": None}]}},
        "execute_kwargs": {"user": "u"},
        "calc_reward_kwargs": {"reward": 0.5},
        "release_kwargs": {"file": str(file)},
    }

    async def work(runner: ToolRunner, toolbox: Toolbox) -> dict[str, float]:
        await toolbox.call("diary", {"entry": "x"})
        rewards = await toolbox.calc_rewards()
        assert await toolbox.release() == []
        return rewards

    row = row_with(diary=kwargs, calculator={})
    assert with_tools(config("Diary", "calculator"), work, row) == {"diary": 0.5, "calculator": 0.0}
    assert eval(file.read_text()) == [
        ["create", {"answer": 7, "nested": {"b": [None, {}]}}],
        ["execute", {"entry": "x"}, {"user": "u"}],
        ["calc_reward", {"reward": 0.5}],
        ["release", {}],
    ]


def test_a_row_chooses_its_tools_and_columns_that_are_null_do_not_count() -> None:
    names = ["calculator", "diary"]
    for row in ({}, {"extra_info": None}, {"extra_info": {"tools_kwargs": None}}):
        assert tools_of_row(row, names) == {"calculator": {}, "diary": {}}
    assert tools_of_row(row_with(calculator=None, diary={"create_kwargs": None}), names) == {"diary": {}}
    assert tools_of_row(row_with(calculator=None, diary=None), names) == {}
    with pytest.raises(InputError, match="did you mean diary"):
        tools_of_row(row_with(dairy={}), names)
    with pytest.raises(InputError, match="did you mean create_kwargs"):
        tools_of_row(row_with(diary={"creat_kwargs": {}}), names)
    found = outcomes([("calculator", {"x": "1"})], config("calculator", "Diary"), row_with(diary={}, calculator=None))
    assert found[0].text == "Error: there is no tool 'calculator'; the tools are diary"


def test_a_row_may_fix_an_argument_of_a_function() -> None:
    row = row_with(fixed={"execute_kwargs": {"index": "wiki"}})
    assert outcomes([("fixed", {"query": "q", "index": "web"})], config("fixed"), row)[0].text == "q in wiki"


def test_a_tool_that_cannot_be_created_or_gives_no_reward_fails_its_trajectory(tmp_path: Path) -> None:
    file = tmp_path / "released"

    async def work(runner: ToolRunner, toolbox: Toolbox) -> None:
        kwargs = {"create_kwargs": {"fail": True}, "release_kwargs": {"file": str(file)}}
        with pytest.raises(ToolFailure, match="create of tool 'diary': RuntimeError: cannot be created") as error:
            await runner.open(row_with(diary=kwargs))
        assert not file.exists()  # what was not created is not released
        assert error.value.status == "error" and "in create" in error.value.detail
        nan = await runner.open(row_with(diary={"calc_reward_kwargs": {"reward": float("nan")}}))
        with pytest.raises(ToolFailure, match="finite"):
            await nan.calc_rewards()

    with_tools(config("Diary"), work)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("number", "1.5"),
        ("dict", '{"a": [1, null], "b": "ü"}'),
        ("numpy", "2.5"),
        ("set", "{1}"),
        ("none", "null"),
        ("surrogate", "a\\ud800b\\x00c"),
    ],
)
def test_answers_of_any_type_become_a_text_that_can_be_written(how: str, text: str) -> None:
    (outcome,) = outcomes([("misbehave", {"how": how})], config("misbehave"))
    assert (outcome.status, outcome.text) == ("ok", text)
    outcome.text.encode()


def test_a_huge_answer_is_cut_in_the_middle() -> None:
    (outcome,) = outcomes([("misbehave", {"how": "huge"})], config("misbehave"))
    assert len(outcome.text) < MAX_TEXT + 100 and "[2000000 characters left out]" in outcome.text


def test_arguments_that_cannot_be_sent_are_refused_or_made_writable() -> None:
    deep: dict[str, Any] = {}
    for _ in range(600):
        deep = {"x": deep}
    calls = [("written", deep), ("written", {"x": [[1]], "y": "\ud800"}), ("written", None), ("written", {"x": {1}})]
    found = outcomes(calls, config("Written"))
    assert [outcome.status for outcome in found] == ["bad_arguments", "ok", "bad_arguments", "bad_arguments"]
    assert "nested deeper than 50" in found[0].text and found[1].text == "got {'x': [[1]], 'y': '?'}"


def test_asynchronous_functions_are_tools_too_and_written_schemas_are_taken_as_they_are() -> None:
    calls = [("wait_a_little", {"seconds": 0.01}), ("written", {"x": [1]})]
    assert [o.text for o in outcomes(calls, config("wait_a_little", "Written"))] == ["waited", "got {'x': [1]}"]


def test_a_pool_whose_process_died_between_calls_is_made_anew() -> None:
    async def work(runner: ToolRunner, toolbox: Toolbox) -> list[str]:
        late = await toolbox.call("misbehave", {"how": "late"})
        await asyncio.sleep(0.5)
        return [late.status, (await toolbox.call("misbehave", {"how": "fine"})).text]

    assert with_tools(config("misbehave"), work) == ["ok", "fine"]


def test_a_pool_that_keeps_breaking_is_an_error_to_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dies_in_pool.py").write_text(
        "import multiprocessing, os\n"
        "if multiprocessing.parent_process() is not None:\n"
        "    os._exit(1)\n"
        "def die(x: str) -> str:\n"
        "    return x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    async def work(runner: ToolRunner, toolbox: Toolbox) -> None:
        with pytest.raises(TransientError, match="broke 4 times"):
            await toolbox.call("die", {"x": ""})

    with_tools(AgentConfig(tools=("dies_in_pool:die",)), work)


def test_a_cancelled_call_is_killed(tmp_path: Path) -> None:
    async def work(runner: ToolRunner, toolbox: Toolbox) -> ToolOutcome:
        call = asyncio.create_task(toolbox.call("misbehave", {"how": f"child {tmp_path / 'pids'}"}))
        await told(tmp_path / "pids")
        call.cancel()
        return await toolbox.call("misbehave", {"how": "fine"})

    assert with_tools(config("misbehave", tool_timeout_s=600), work).text == "fine"
    assert gone(tmp_path / "pids")


def test_closing_ends_calls_and_all_that_they_started(tmp_path: Path) -> None:
    async def work(runner: ToolRunner, toolbox: Toolbox) -> None:
        begun = [
            toolbox.call("misbehave", {"how": f"child {tmp_path / 'pids'}"}),
            toolbox.call("nap", {"seconds": 600}),
        ]
        calls = asyncio.gather(*begun, return_exceptions=True)
        await told(tmp_path / "pids")
        begin = time.monotonic()
        await runner.close()
        assert time.monotonic() - begin < 2
        assert [type(end) for end in await calls] == [TransientError] * 2

    with_tools(config("misbehave", "nap", tool_timeout_s=600), work)
    assert gone(tmp_path / "pids")


def test_processes_need_no_main_module_and_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    told = tmp_path / "pids"
    program.write_text(
        f"import sys; sys.path[:0] = {[str(HERE.parent), str(HERE)]}\n"
        "import asyncio, os, signal\n"
        "from pathlib import Path\n"
        "from rl_core.rollout.agent.tool_runner import AgentConfig, ToolRunner\n"
        "print('main is imported', flush=True)\n"
        "async def main():\n"
        "    runner = ToolRunner(AgentConfig(tools=('tools_for_tests:misbehave',)))\n"
        "    await runner.start()\n"
        "    toolbox = await runner.open({})\n"
        f"    call = asyncio.create_task(toolbox.call('misbehave', {{'how': 'child {told}'}}))\n"
        f"    while not (Path({str(told)!r}).exists() and Path({str(told)!r}).read_text()):\n"
        "        await asyncio.sleep(0.02)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, program], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == -9 and done.stdout == "main is imported\n"
    assert gone(told)


async def told(file: Path) -> None:
    while not (file.exists() and file.read_text()):
        await asyncio.sleep(0.02)


def gone(file: Path) -> bool:
    """Whether the processes whose ids are in the file are gone, or go at once."""
    deadline = time.monotonic() + 3
    pids = [int(pid) for pid in file.read_text().split()]
    while alive := [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return not alive


def test_the_processes_load_nothing_heavy() -> None:
    assert outcomes([("loaded", {"x": ""})], config("loaded"))[0].text == "false"


def test_schemas_are_there_without_any_process() -> None:
    names = [schema["function"]["name"] for schema in tool_schemas(config("calculator", "Diary"))]
    assert names == ["calculator", "diary"] and not pool_processes()


def test_what_is_started_twice_is_there_once_and_closed() -> None:
    async def run() -> int:
        async with ToolRunner(config("calculator")) as runner:
            await runner.start()
            return len(pool_processes())

    assert asyncio.run(run()) == config("calculator").tool_processes and not pool_processes()


def test_without_tools_no_process_is_started() -> None:
    async def work(runner: ToolRunner, toolbox: Toolbox) -> tuple[list[Any], ToolOutcome]:
        assert not pool_processes()
        return toolbox.schemas, await toolbox.call("x", {})

    schemas, outcome = with_tools(AgentConfig(), work)
    assert schemas == [] and outcome.text == "Error: there is no tool 'x'; there are no tools"
