"""Calls methods of user-defined objects in worker processes, which are killed at a deadline.

An object is passed as its pickle and never unpickled in the calling process.
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
"""Maximum length of a stored traceback in characters; only its end is kept."""
MAX_MESSAGE = 500
"""Maximum length in characters of an error message for the policy."""


@dataclass(frozen=True)
class Reply:
    """Outcome of a call: a value and the object's new state, or an error message in `text`."""

    status: Literal["ok", "bad_arguments", "error", "timeout"]
    value: Any = None
    state: bytes = b""
    text: str = ""
    detail: str = ""


class CallPool(Processes):
    """Worker processes for the calls, alive from `start` to `close`."""

    def __init__(self, processes: int, timeout_s: float, modules: tuple[str, ...]) -> None:
        """Each process imports `modules` before its first call."""
        super().__init__(processes, timeout_s, _start, (modules,), "tools and environments")

    async def call(self, state: bytes, action: Callable[..., Any], *args: Any) -> Reply:
        """Calls `action(object, *args)`; the object is unpickled from `state`, or a new instance if `state` is a class.

        The deadline starts when a process picks up the call. A cancelled call is killed. Raises TransientError if the
        processes themselves fail.
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
        except Exception as error:  # a user's object can make its reply fail in any way
            return Reply("error", text=f"its answer is lost ({type(error).__name__})")
        return reply


def perform(payload: bytes) -> Reply:
    """Performs one call, inside a process of the pool."""
    try:
        state, action, args = pickle.loads(payload)
        subject = pickle.loads(state)
        if isinstance(subject, type):
            subject = subject()
        value = action(subject, *args)
        return Reply("ok", value, pickle.dumps(subject))
    except BaseException as error:  # including SystemExit: an error affects this call only
        message = str(error) if isinstance(error, ToolError | BadArguments) else f"{type(error).__name__}: {error}"
        status: Literal["bad_arguments", "error"] = "bad_arguments" if isinstance(error, BadArguments) else "error"
        detail = writable(traceback.format_exc()[-MAX_DETAIL:])
        return Reply(status, text=writable(message[:MAX_MESSAGE]), detail=detail)


def checked_reward(reward: Any) -> float:
    """The reward as a float; raises ValueError if it is not a finite number."""
    if not isinstance(reward, Real) or not isfinite(reward):
        raise ValueError(f"expected a finite number as reward, got {reward!r}")
    return float(reward)


def _start(modules: tuple[str, ...]) -> None:
    prepare_process()
    for module in modules:
        with suppress(Exception):  # reported with each call
            importlib.import_module(module)
