"""The Ray actors that hold the workers; nothing heavy is imported before their environment is set."""

import inspect
import os
from collections.abc import Mapping
from typing import Any

from rl_core.cluster.stall import RankProcess, offer_stacks


class Host:
    """The Ray actor of a rank: creates its worker and calls the worker's methods.

    The worker is created by a call, so that an error of its constructor reaches the driver like that of any method.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        """Sets the rank's environment in this process, which Ray has started and may have kept ready.

        Libraries read it when they are imported with the worker's class.
        """
        os.environ.update(env)

    def offer_stacks(self) -> RankProcess:
        """Prepares this process to report its stacks when it hangs; returns where."""
        return offer_stacks()

    def start(self, worker_class: type, args: tuple[Any, ...]) -> None:
        """Creates the worker."""
        self.worker = worker_class(*args)

    def call(self, method: str, answers: bool, *args: Any) -> Any:
        """Runs a method; returns its result if `answers`, otherwise None since another rank returns the same one."""
        result = getattr(self.worker, method)(*args)
        return result if answers else None


class AsyncHost(Host):
    """The Ray actor of a rank whose methods may be coroutines, which run concurrently in one event loop."""

    async def call(self, method: str, answers: bool, *args: Any) -> Any:
        """Runs a method, and awaits it if it is a coroutine."""
        result = super().call(method, True, *args)
        if inspect.isawaitable(result):
            result = await result
        return result if answers else None
