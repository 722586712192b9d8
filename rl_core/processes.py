"""Processes that run code which may hang, crash or leave children behind; they start without the main module."""

import multiprocessing
import multiprocessing.context
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def prepare_process() -> None:
    """Makes this process end, with all that it started, when it is terminated or the one that started it ends."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, _end_group)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def writable(text: str) -> str:
    """The text without what files and tokenizers refuse: lone surrogates and NUL are written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


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
        with _without_main():
            super().start()


class PoolContext(multiprocessing.context.SpawnContext):
    """Context of process pools that run what others wrote."""

    Process = PoolProcess
