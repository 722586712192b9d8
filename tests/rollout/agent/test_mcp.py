import asyncio
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_core.config.schema import AgentConfig
from rl_core.errors import InputError, TransientError
from rl_core.rollout.agent.tool_runner import Toolbox, ToolOutcome, ToolRunner, tool_schemas

SCRIPT = Path(__file__).parents[2] / "mcp_server_for_tests.py"
SERVER = f"{sys.executable} {SCRIPT}"
NAMES = ["add", "process", "misbehave"]


def config(*servers: str, **settings: Any) -> AgentConfig:
    return AgentConfig(**{"mcp_servers": servers, "tool_timeout_s": 2.0, **settings})


def with_servers(
    settings: AgentConfig,
    work: Callable[[Toolbox], Coroutine[Any, Any, Any]],
    row: dict[str, Any] | None = None,
) -> Any:
    """What the work returns; afterwards no server is left."""

    async def run() -> Any:
        async with ToolRunner(settings) as runner:
            return await work(await runner.open(row or {}))

    found = asyncio.run(run())
    assert not [child for child in psutil.Process().children() if child.cmdline()[-1:] == [str(SCRIPT)]]
    return found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, SCRIPT, "http", str(port)], stderr=subprocess.DEVNULL)
    while socket.socket().connect_ex(("127.0.0.1", port)):
        assert server.poll() is None
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/mcp"
    server.kill()
    server.wait()


def test_tools_of_a_server_have_schemas_and_answer() -> None:
    schemas = tool_schemas(config(SERVER, tools=("calculator",)))
    assert [schema["function"]["name"] for schema in schemas] == ["calculator", *NAMES]
    assert schemas[1]["function"]["description"] == "The sum of two numbers."
    assert schemas[1]["function"]["parameters"]["required"] == ["a", "b"]

    async def work(toolbox: Toolbox) -> list[ToolOutcome]:
        assert toolbox.schemas == schemas[1:]
        calls = [("add", {"a": 1, "b": 2}), ("add", {"a": "x"}), ("misbehave", {"how": "nul"}), ("sub", {})]
        return [await toolbox.call(*call) for call in calls]

    outcomes = with_servers(config(SERVER), work)
    assert [outcome.status for outcome in outcomes] == ["ok", "error", "ok", "unknown_tool"]
    assert outcomes[0].text == "3" and outcomes[2].text == "a\\x00b"
    assert "a" in outcomes[1].text and outcomes[1].text.startswith("Error: ")


def test_a_row_chooses_tools_of_a_server_and_may_fix_arguments() -> None:
    async def work(toolbox: Toolbox) -> list[str]:
        assert [schema["function"]["name"] for schema in toolbox.schemas] == ["add"]
        assert await toolbox.calc_rewards() == {"add": 0.0}
        return [(await toolbox.call("add", {"a": 1})).text]

    kwargs = {"add": {"execute_kwargs": {"b": 40}}, "process": None}
    assert with_servers(config(SERVER), work, {"extra_info": {"tools_kwargs": kwargs}}) == ["41"]


def test_calls_of_one_session_run_at_the_same_time() -> None:
    async def work(toolbox: Toolbox) -> tuple[float, set[str]]:
        begin = time.monotonic()
        outcomes = await asyncio.gather(*(toolbox.call("process", {}) for _ in range(8)))
        return time.monotonic() - begin, {outcome.text for outcome in outcomes}

    seconds, pids = with_servers(config(SERVER), work)
    assert len(pids) == 1 and seconds < 1.2


def test_a_call_that_takes_too_long_ends_and_the_session_stays() -> None:
    async def work(toolbox: Toolbox) -> list[ToolOutcome]:
        hanging = await toolbox.call("misbehave", {"how": "sleep"})
        return [hanging, await toolbox.call("add", {"a": 1, "b": 1})]

    hanging, after = with_servers(config(SERVER, tool_timeout_s=1.0), work)
    assert hanging.status == "timeout" and hanging.seconds < 2
    assert after.text == "2"


def test_a_server_that_died_is_started_again_once_a_call() -> None:
    async def work(toolbox: Toolbox) -> list[ToolOutcome]:
        first = await toolbox.call("process", {})
        psutil.Process(int(first.text)).kill()
        again = await asyncio.gather(toolbox.call("process", {}), toolbox.call("process", {}))
        assert again[0].text == again[1].text != first.text
        return [*again, await toolbox.call("misbehave", {"how": "exit"}), await toolbox.call("add", {"a": 1, "b": 1})]

    *again, dead, after = with_servers(config(SERVER, tool_timeout_s=10.0), work)
    assert [outcome.status for outcome in again] == ["ok", "ok"]
    assert dead.status == "error" and "does not answer" in dead.text
    assert after.text == "2"


def test_a_server_may_be_reached_over_http(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def work(toolbox: Toolbox) -> list[str]:
        return [(await toolbox.call("add", {"a": 1, "b": 2})).text, (await toolbox.call("add", {"a": "x"})).status]

    assert with_servers(config(url.replace("127", "me:secret@127")), work) == ["3", "error"]
    assert "secret" not in caplog.text


def test_secrets_come_up_in_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TEST_KEY", "s3cret")
    caplog.set_level("INFO")

    async def work(toolbox: Toolbox) -> str:
        return (await toolbox.call("misbehave", {"how": "tell"})).text

    assert with_servers(config(f"env SECRET_KEY=$TEST_KEY {SERVER}"), work) == (
        "Error: Error executing tool misbehave: the key *** is refused"
    )
    for setting in ("http://me:s3cret@127.0.0.1:9/mcp?key=$TEST_KEY", "env KEY=$TEST_KEY false"):
        with pytest.raises(TransientError) as error:
            tool_schemas(config(setting))
        shown = "".join(traceback.format_exception(error.value))
        assert "MCP server" in shown and "s3cret" not in shown + caplog.text


def test_servers_that_cannot_be_used_are_refused() -> None:
    for setting, message in (("no-such-command-here", "no-such-command-here"), ("a 'b", "quotation"), ("", "empty")):
        with pytest.raises(InputError, match=message):
            tool_schemas(config(setting))
    with pytest.raises(InputError, match="two tools named 'add'"):
        tool_schemas(config(SERVER, SERVER))
