"""A method that the ranks of a group are running: waiting for it, and saying why it failed."""

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from rl_core.errors import RollforwardError, TransientError, WorkerError, WorkerLost

# Seconds between looks at the clock while waiting; a signal is answered within this time.
POLL = 1.0
# Seconds that a broken collective has to be explained by the error of another rank, or by its death.
GRACE = 5.0
# What the collectives of a rank say when another rank has gone.
BROKEN_COLLECTIVE = re.compile(r"gloo|nccl|ProcessGroup|TCPStore|connection (was )?(closed|reset)|broken pipe", re.I)
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Call:
    """The handle of a call; `get` waits for its result, and may be called once other calls are under way."""

    def __init__(
        self,
        name: str,
        method: str,
        refs: list[ray.ObjectRef],
        deadline: float,
        collect: Callable[[list[Any]], Any],
    ) -> None:
        """`refs` has one entry a rank that runs the method; `deadline` seconds from now the call has failed."""
        self.name, self.method, self.refs, self.deadline, self.collect = name, method, refs, deadline, collect
        self.start = time.monotonic()

    def get(self) -> Any:
        """The result, joined from the ranks.

        Raises a rank's own error as what it is, so that its kind decides about a retry, WorkerError for what a rank
        raised unforeseen, WorkerLost when a rank was lost, and TransientError when one did not answer within the
        deadline.
        """
        results: dict[ray.ObjectRef, Any] = {}
        failures: dict[ray.ObjectRef, RayError] = {}
        pending, failed_at = self.refs, 0.0
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL)
            failures |= self._fetch(done, results)
            now = time.monotonic()
            failed_at = failed_at or (now if failures else 0.0)
            explained = any(not _is_consequence(error) for error in failures.values())
            if failures and (explained or not pending or now - failed_at > GRACE):
                self._raise(failures)
            if not failures and pending and self.late:
                late = [rank for rank, ref in enumerate(self.refs) if ref in pending]
                raise TransientError(
                    f"{self.name}.{self.method} on rank(s) {late} did not answer within {self.deadline:.0f} s "
                    "(trainer.call_timeout_s)"
                )
        return self.collect([results[ref] for ref in self.refs])

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() - self.start > self.deadline

    def settled(self) -> bool:
        """Whether `get` has nothing to wait for: all ranks are done, one has failed, or the deadline has passed."""
        done, pending = ray.wait(self.refs, num_returns=len(self.refs), timeout=0)
        return not pending or self.late or bool(self._fetch(done, {}))

    def _fetch(self, done: list[ray.ObjectRef], results: dict[ray.ObjectRef, Any]) -> dict[ray.ObjectRef, RayError]:
        """Adds the results of calls that have ended; returns the errors of the others."""
        try:
            results |= zip(done, ray.get(done), strict=True)
            return {}
        except RayError:
            pass
        failures = {}
        for ref in done:
            try:
                results[ref] = ray.get(ref)
            except RayError as error:
                failures[ref] = error
        return failures

    def _raise(self, failures: dict[ray.ObjectRef, RayError]) -> None:
        """The error that the others follow from: a rank's own, or else the loss of a rank, or else what collectives
        say."""
        ref, error = min(failures.items(), key=lambda item: (_is_consequence(item[1]), _is_loss(item[1])))
        rank = self.refs.index(ref)
        where = f"{self.name}.{self.method} on rank {rank}"
        if not isinstance(error, RayTaskError):
            raise WorkerLost(f"rank {rank} of {self.name} was lost during {self.method}: {error}") from error
        cause, trace = error.cause, ANSI.sub("", str(error))
        if isinstance(cause, RollforwardError):
            cause.add_note(f"raised by {where}")
            raise cause from error
        if _is_consequence(error):
            raise WorkerLost(f"{where} lost the other ranks: {cause}\n\n{trace}") from None
        raise WorkerError(f"{where} raised {type(cause).__name__}: {cause}\n\n{trace}") from None


def first_settled(calls: Sequence[Call]) -> Call:
    """Waits for the first of the calls that is settled; earlier ones in the list come first."""
    refs = list(dict.fromkeys(ref for call in calls for ref in call.refs))
    while True:
        for call in calls:
            if call.settled():
                return call
        _, pending = ray.wait(refs, num_returns=len(refs), timeout=0)
        ray.wait(pending, num_returns=1, timeout=POLL)


def finish_together(calls: Sequence[Call]) -> None:
    """Waits for calls that need each other; raises what goes wrong first, though others may then hang."""
    waiting = list(calls)
    while waiting:
        call = first_settled(waiting)
        call.get()
        waiting.remove(call)


def _is_loss(error: RayError) -> bool:
    return not isinstance(error, RayTaskError)


def _is_consequence(error: RayError) -> bool:
    """Whether a rank only says that another one is gone."""
    if not isinstance(error, RayTaskError) or isinstance(error.cause, RollforwardError):
        return False
    return BROKEN_COLLECTIVE.search(f"{type(error.cause).__name__}: {error.cause}") is not None
