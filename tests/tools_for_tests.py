"""Tools and environments, some of which misbehave; their processes import this module by name."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from rl_core.rollout.environment import Environment, EnvironmentStep
from rl_core.rollout.tools import Tool, ToolError, ToolResult, tool


@tool
def misbehave(how: str) -> Any:
    """Do what the argument says."""
    if how == "sleep":
        time.sleep(600)
    if how == "loop":
        while True:
            pass
    if how == "raise":
        raise RuntimeError("tool \ud800 is broken")
    if how == "refuse":
        raise ToolError("no such page")
    if how == "exit":
        os._exit(3)
    if how == "system exit":
        sys.exit(3)
    if how == "late":  # the process dies when it has no call
        signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
    if how.startswith("child"):
        child = subprocess.Popen(["sleep", "600"])
        Path(how.split()[1]).write_text(f"{os.getpid()} {child.pid}")
        child.wait()
    answers = {
        "number": 1.5,
        "dict": {"a": [1, None], "b": "ü"},
        "numpy": np.float32(2.5),
        "set": {1},
        "none": None,
        "surrogate": "a\ud800b\0c",
        "huge": "x" * 3_000_000,
    }
    return answers.get(how, how)


def nap(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


async def wait_a_little(seconds: float) -> str:
    import asyncio

    await asyncio.sleep(seconds)
    return "waited"


def fixed(query: str, index: str = "web") -> str:
    return f"{query} in {index}"


def loaded(x: str) -> bool:
    """Whether a heavy module, or the tests' own main module, is loaded here."""
    return "torch" in sys.modules or "mcp" in sys.modules or "pytest" in sys.modules


def no_hint(a: int, b) -> int:  # type: ignore[no-untyped-def]
    return a


class Diary(Tool):
    """Writes down what is called."""

    name = "diary"
    description = "Keeps what it is told."

    class arguments(BaseModel):
        entry: str

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def create(self, **kwargs: Any) -> None:
        self.entries.append(["create", kwargs])
        if kwargs.get("fail"):
            raise RuntimeError("cannot be created")

    def execute(self, arguments: dict[str, Any], **kwargs: Any) -> ToolResult:
        self.entries.append(["execute", arguments, kwargs])
        if arguments["entry"] == "raise":
            raise RuntimeError("no")
        if arguments["entry"] == "sleep":
            time.sleep(600)
        return ToolResult(str(len(self.entries)), 0.25)

    def calc_reward(self, **kwargs: Any) -> float:
        self.entries.append(["calc_reward", kwargs])
        return float(kwargs.get("reward", len(self.entries)))

    def release(self, file: str = "", **kwargs: Any) -> None:
        self.entries.append(["release", kwargs])
        if file:
            Path(file).write_text(repr(self.entries))


class Written(Tool):
    """A tool whose schema is written out."""

    def schema(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "written", "description": "", "parameters": {}}}

    def execute(self, arguments: dict[str, Any], **kwargs: Any) -> str:
        return f"got {arguments}"


class NoSchema(Tool):
    name = "no_schema"


class NoExecute(Written):
    execute = Tool.execute  # type: ignore[assignment]


class NoStep(Environment):
    pass


class Particular(Environment):
    """Cannot be made without an argument."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def step(self, turn: str) -> EnvironmentStep:
        return EnvironmentStep(done=True)


class Countdown(Environment):
    """Counts turns down; some turns make it misbehave."""

    left: Any = 2

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self.left = row.get("turns", 2)
        if self.left == "raise":
            raise RuntimeError("cannot begin")
        return [{"role": "user", "content": f"{self.left} turns \ud800"}] if self.left else []

    def step(self, turn: str) -> Any:
        self.left -= 1
        if turn == "sleep":
            time.sleep(600)
        if turn == "exit":
            os._exit(1)
        if turn == "messages":
            return EnvironmentStep([{"role": "user"}])
        if turn == "reward":
            return EnvironmentStep([], float("nan"))
        if turn == "nothing":
            return None
        return EnvironmentStep([{"role": "user", "content": str(self.left)}], 0.5, self.left == 0)
