"""Processes that run code which may hang, crash or leave children behind; they start without the main module."""

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
"""Time after which a waiting call looks whether its pool still works."""
START_S = 60.0
"""Time that a replaced process has to come up before its pool counts as broken."""
MAX_RESTARTS = 3
"""Times that the pool is made anew for one call."""


def prepare_process() -> None:
    """Makes this process end, with all that it started, when it is terminated or the one that started it ends."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, _end_group)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def writable(text: str) -> str:
    """The text without what files and tokenizers refuse: lone surrogates and NUL are written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def finished(value: Any) -> Any:
    """What a function returned, or what comes of it where the function is asynchronous."""

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
    """Spawned processes import the parent's main module again; these need none of it, and it may be heavy."""
    main = vars(sys.modules["__main__"])
    with _MAIN:
        hidden = {name: main[name] for name in MAIN_NAMES if name in main}
        main.update(dict.fromkeys(MAIN_NAMES))
        try:
            yield
        finally:
            for name in MAIN_NAMES:  # a main module without file has no such name, which others ask for
                del main[name]
            main.update(hidden)


class PoolProcess(multiprocessing.context.SpawnProcess):
    """A spawned process that starts without the parent's main module."""

    def start(self) -> None:
        """See `multiprocessing.Process`."""
        with _without_main():
            super().start()


class PoolContext(multiprocessing.context.SpawnContext):
    """Context of process pools that run what others wrote."""

    Process = PoolProcess


class Processes:
    """Processes that take calls from `start` to `close`; those that are late are killed and replaced."""

    def __init__(
        self,
        number: int,
        timeout_s: float,
        initializer: Callable[..., None],
        initargs: tuple[Any, ...],
        purpose: str,
    ) -> None:
        """`initializer(*initargs)` runs in each process at its start; `purpose` is what errors call the processes."""
        self._number, self._timeout_s, self._purpose = number, timeout_s, purpose
        self._initializer, self._initargs = initializer, initargs
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

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """What the function returns, or raises, in a process; the deadline counts from when one takes the call up.

        A cancelled call is killed. Raises TimeoutError for a late call, pebble's ProcessExpired for one whose process
        died, and TransientError when the processes themselves do not work.
        """
        if not self._waiting:
            self._moved = time.monotonic()
        self._waiting += 1
        try:
            for _ in range(MAX_RESTARTS + 1):
                pool = await self._live_pool()
                try:
                    future = pool.schedule(function, args=args, timeout=self._timeout_s)
                except RuntimeError:  # the pool broke before it took the call
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
                if time.monotonic() - self._moved > self._timeout_s + START_S:
                    pool.stop()
                if not pool.active:
                    raise BrokenProcessPool("the pool died without a word")
        finally:
            waiting.cancel()
        self._moved = time.monotonic()
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
        if not pool.active:  # asking starts the processes
            raise TransientError(f"the processes of {self._purpose} did not start")
        return pool


def _end(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()
