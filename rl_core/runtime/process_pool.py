"""Pool of processes for code that may hang, crash or leave children behind; they start without the main module."""

import asyncio
import inspect
import multiprocessing
import multiprocessing.context
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from pebble import ProcessPool

from rl_core.errors import TransientError

CHECK_S = 1.0
"""Interval at which a waiting call checks that its pool is alive."""
START_S = 60.0
"""Time for a replacement process to start before its pool counts as broken."""
MAX_RESTARTS = 3
"""Maximum restarts of the pool for one call."""


def prepare_process() -> None:
    """Makes this process end, with its whole process group, when it receives SIGTERM or its parent ends."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, _end_group)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def writable(text: str) -> str:
    """The text with lone surrogates and NUL, which files and tokenizers reject, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def finished(value: Any) -> Any:
    """The value, awaited if it is awaitable."""

    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


def _end_group(*_: object) -> None:
    os.killpg(0, signal.SIGKILL)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        _end_group()


_MAIN = threading.Lock()
MAIN_NAMES = ("__spec__", "__file__")


@contextmanager
def _without_main() -> Iterator[None]:
    """Hides the main module, which spawned processes would import again: they do not need it, and it may be heavy."""
    main = vars(sys.modules["__main__"])
    with _MAIN:
        hidden = {name: main[name] for name in MAIN_NAMES if name in main}
        main.update(dict.fromkeys(MAIN_NAMES))
        try:
            yield
        finally:
            for name in MAIN_NAMES:  # restores absence, too: a main module without a file lacks these names
                del main[name]
            main.update(hidden)


class PoolProcess(multiprocessing.context.SpawnProcess):
    """A spawned process that starts without the parent's main module."""

    def start(self) -> None:
        """See `multiprocessing.Process`."""
        with _without_main():
            super().start()


class PoolContext(multiprocessing.context.SpawnContext):
    """Multiprocessing context of pools that run user code."""

    Process = PoolProcess


class Processes:
    """A process pool that accepts calls from `start` to `close`; processes that exceed the timeout are replaced."""

    def __init__(
        self,
        number: int,
        timeout_s: float,
        initializer: Callable[..., None],
        initargs: tuple[Any, ...],
        purpose: str,
    ) -> None:
        """`initializer(*initargs)` runs at the start of each process; `purpose` names the processes in errors."""
        self._number, self._timeout_s, self._purpose = number, timeout_s, purpose
        self._initializer, self._initargs = initializer, initargs
        self._lock = asyncio.Lock()
        self._pool: ProcessPool | None = None
        self._waiting, self._last_progress = 0, 0.0

    async def start(self) -> None:
        """Starts the processes unless they are running; raises TransientError if they do not start."""
        async with self._lock:
            self._pool = self._pool or await asyncio.to_thread(self._new_pool)

    async def close(self) -> None:
        """Kills the processes; calls still waiting raise TransientError."""
        async with self._lock:
            pool, self._pool = self._pool, None
            if pool is not None:
                await asyncio.to_thread(_end, pool)

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs the function in a process and returns or raises its result; the timeout starts when a process takes it.

        A cancelled call is killed. Raises TimeoutError on timeout, pebble's ProcessExpired if the process died, and
        TransientError if the pool itself fails.
        """
        if not self._waiting:
            self._last_progress = time.monotonic()
        self._waiting += 1
        try:
            for _ in range(MAX_RESTARTS + 1):
                pool = await self._live_pool()
                try:
                    future = pool.schedule(function, args=args, timeout=self._timeout_s)
                except RuntimeError:  # the pool broke before it accepted the call
                    continue
                try:
                    return await self._result(pool, future)
                except BrokenProcessPool:
                    continue
        finally:
            self._waiting -= 1
        raise TransientError(f"the processes of {self._purpose} broke {MAX_RESTARTS + 1} times within one call")

    async def _result(self, pool: ProcessPool, future: "Future[Any]") -> Any:
        waiting = asyncio.wrap_future(future)
        try:
            while not (await asyncio.wait({waiting}, timeout=CHECK_S))[0]:
                if time.monotonic() - self._last_progress > self._timeout_s + START_S:
                    pool.stop()
                if not pool.active:
                    raise BrokenProcessPool("the pool died silently")
        finally:
            waiting.cancel()
        self._last_progress = time.monotonic()
        return waiting.result()

    async def _live_pool(self) -> ProcessPool:
        async with self._lock:
            if self._pool is None:
                raise TransientError(f"the processes of {self._purpose} are closed")
            if not self._pool.active:
                await asyncio.to_thread(_end, self._pool)
                self._pool = await asyncio.to_thread(self._new_pool)
            return self._pool

    def _new_pool(self) -> ProcessPool:
        pool = ProcessPool(self._number, initializer=self._initializer, initargs=self._initargs, context=PoolContext())
        if not pool.active:  # reading this property starts the processes
            raise TransientError(f"the processes of {self._purpose} did not start")
        return pool


def _end(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()
