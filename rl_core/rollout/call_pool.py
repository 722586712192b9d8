"""Calls of objects that others wrote, in processes with a deadline that kills.

An object travels as its pickle and is never unpickled where the calls are made.
"""

import importlib
import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, Literal

from pebble import ProcessExpired

from rl_core.errors import TransientError
from rl_core.rollout.tools import BadArguments, ToolError
from rl_core.runtime.process_pool import Processes, prepare_process, writable

MAX_DETAIL = 4000
"""Characters of a traceback that are kept: its end."""
MAX_MESSAGE = 500
"""Characters of an error's message that the policy reads."""


@dataclass(frozen=True)
class Reply:
    """How a call ended: with a value and the object's new state, or with a text that says why not."""

    status: Literal["ok", "bad_arguments", "error", "timeout"]
    value: Any = None
    state: bytes = b""
    text: str = ""
    detail: str = ""


class CallPool(Processes):
    """Processes that make the calls, from `start` to `close`."""

    def __init__(self, processes: int, timeout_s: float, modules: tuple[str, ...]) -> None:
        """The modules are imported before a process takes up its first call."""
        super().__init__(processes, timeout_s, _start, (modules,), "tools and environments")

    async def call(self, state: bytes, action: Callable[..., Any], *args: Any) -> Reply:
        """Calls `action(object, *args)`, where the object is that of the state, or a new one when that is a class.

        The deadline counts from when a process takes the call up. A cancelled call is killed. Raises TransientError
        when the processes themselves do not work.
        """
        payload = pickle.dumps((state, action, args))
        try:
            reply: Reply = await self.run(perform, payload)
        except TransientError:
            raise
        except TimeoutError:
            return Reply("timeout", text=f"no answer within {self._timeout_s:g} s")
        except ProcessExpired as error:
            return Reply("error", text=f"its process died with exit code {error.exitcode}")
        except Exception as error:  # whatever the object did to keep its reply from coming through
            return Reply("error", text=f"its answer is lost ({type(error).__name__})")
        return reply


def perform(payload: bytes) -> Reply:
    """One call, inside a process of the pool."""
    try:
        state, action, args = pickle.loads(payload)
        subject = pickle.loads(state)
        if isinstance(subject, type):
            subject = subject()
        value = action(subject, *args)
        return Reply("ok", value, pickle.dumps(subject))
    except BaseException as error:  # also SystemExit: whatever is raised concerns this call only
        said = str(error) if isinstance(error, ToolError | BadArguments) else f"{type(error).__name__}: {error}"
        status: Literal["bad_arguments", "error"] = "bad_arguments" if isinstance(error, BadArguments) else "error"
        detail = writable(traceback.format_exc()[-MAX_DETAIL:])
        return Reply(status, text=writable(said[:MAX_MESSAGE]), detail=detail)


def checked_reward(reward: Any) -> float:
    """The reward as a plain float; raises ValueError when it is not a finite number."""
    if not isinstance(reward, Real) or not isfinite(reward):
        raise ValueError(f"expected a finite number as reward, got {reward!r}")
    return float(reward)


def _start(modules: tuple[str, ...]) -> None:
    prepare_process()
    for module in modules:
        with suppress(Exception):  # reported with each call
            importlib.import_module(module)
