"""Calls of objects that others wrote, in processes with a deadline that kills.

An object travels as its pickle and is never unpickled where the calls are made.
"""

import asyncio
import importlib
import inspect
import pickle
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, Literal

from pebble import ProcessExpired, ProcessPool

from rl_core.errors import TransientError
from rl_core.processes import PoolContext, prepare_process, writable
from rl_core.rollout.tools import BadArguments, ToolError

MAX_DETAIL = 4000
"""Characters of a traceback that are kept: its end."""
MAX_MESSAGE = 500
"""Characters of an error's message that the policy reads."""
CHECK_S = 1.0
"""Time after which a waiting call looks whether its pool still works."""
START_S = 60.0
"""Time that a replaced process has to come up before its pool counts as broken."""
MAX_RESTARTS = 3
"""Times that the pool is made anew for one call."""


@dataclass(frozen=True)
class Reply:
    """How a call ended: with a value and the object's new state, or with a text that says why not."""

    status: Literal["ok", "bad_arguments", "error", "timeout"]
    value: Any = None
    state: bytes = b""
    text: str = ""
    detail: str = ""


class CallPool:
    """Processes that make the calls, from `start` to `close`."""

    def __init__(self, processes: int, timeout_s: float, modules: tuple[str, ...]) -> None:
        """The modules are imported before a process takes up its first call."""
        self._processes, self._timeout_s, self._modules = processes, timeout_s, modules
        self._lock = asyncio.Lock()
        self._pool: ProcessPool | None = None
        self._waiting, self._moved = 0, 0.0

    async def start(self) -> None:
        """Raises TransientError when the processes do not start; does nothing when they are there."""
        async with self._lock:
            self._pool = self._pool or await asyncio.to_thread(self._new_pool)

    async def close(self) -> None:
        """Ends the processes, whatever they are doing; calls that still wait raise TransientError."""
        async with self._lock:
            pool, self._pool = self._pool, None
            if pool is not None:
                await asyncio.to_thread(_end, pool)

    async def call(self, state: bytes, action: Callable[..., Any], *args: Any) -> Reply:
        """Calls `action(object, *args)`, where the object is that of the state, or a new one when that is a class.

        The deadline counts from when a process takes the call up. A cancelled call is killed. Raises TransientError
        when the processes themselves do not work.
        """
        payload = pickle.dumps((state, action, args))
        if not self._waiting:
            self._moved = time.monotonic()
        self._waiting += 1
        try:
            for _ in range(MAX_RESTARTS + 1):
                pool = await self._live_pool()
                with suppress(RuntimeError):  # the pool broke, before or after it took the call
                    future = pool.schedule(perform, args=(payload,), timeout=self._timeout_s)
                    return await self._reply(pool, future)
        finally:
            self._waiting -= 1
        raise TransientError(f"the processes of tools and environments broke {MAX_RESTARTS + 1} times within one call")

    async def _reply(self, pool: ProcessPool, future: "Future[Reply]") -> Reply:
        waiting = asyncio.wrap_future(future)
        try:
            while not (await asyncio.wait({waiting}, timeout=CHECK_S))[0]:
                if time.monotonic() - self._moved > self._timeout_s + START_S:
                    pool.stop()
                if not pool.active:
                    raise BrokenProcessPool("the pool died without a word")
        finally:
            waiting.cancel()
        self._moved = time.monotonic()
        try:
            return waiting.result()
        except BrokenProcessPool:
            raise
        except TimeoutError:
            return Reply("timeout", text=f"no answer within {self._timeout_s:g} s")
        except ProcessExpired as error:
            return Reply("error", text=f"its process died with exit code {error.exitcode}")
        except Exception as error:  # whatever the object did to keep its reply from coming through
            return Reply("error", text=f"its answer is lost ({type(error).__name__})")

    async def _live_pool(self) -> ProcessPool:
        async with self._lock:
            if self._pool is None:
                raise TransientError("the processes of tools and environments are closed")
            if not self._pool.active:
                await asyncio.to_thread(_end, self._pool)
                self._pool = await asyncio.to_thread(self._new_pool)
            return self._pool

    def _new_pool(self) -> ProcessPool:
        pool = ProcessPool(self._processes, initializer=_start, initargs=(self._modules,), context=PoolContext())
        if not pool.active:  # asking starts the processes
            raise TransientError("the processes of tools and environments did not start")
        return pool


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


def finished(value: Any) -> Any:
    """What a method returned, or what comes of it where the method is asynchronous."""

    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


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


def _end(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()
