"""Calls of a method on the ranks of a group: waiting for the result, and finding the cause of a failure."""

import logging
import re
import threading
import time
from collections.abc import Callable, MutableSequence, Sequence
from statistics import median
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from rl_core.cluster.resources import signals_pass
from rl_core.cluster.stall import RankProcess, clock, stalled
from rl_core.errors import RollforwardError, WorkerError, WorkerLost
from rl_core.runtime.watchdog import progress

logger = logging.getLogger(__name__)

POLL = 0.25
"""Polling interval in seconds; also the maximum delay before a signal is handled."""
GRACE = 5.0
"""Seconds to wait, after a collective broke, for the error or the death of the rank that caused it."""
UNUSUAL, UNUSUAL_S = 10.0, 60.0
"""Warn once while waiting if a call exceeds UNUSUAL × its median duration (at least UNUSUAL_S seconds); for the first
call of a method, after half of its deadline."""
# Error messages of collectives after another rank has died.
BROKEN_COLLECTIVE = re.compile(r"gloo|nccl|ProcessGroup|TCPStore|connection (was )?(closed|reset)|broken pipe", re.I)
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Call:
    """Handle of a call; `get` waits for its result. Several calls may be in flight."""

    def __init__(
        self,
        name: str,
        method: str,
        refs: list[ray.ObjectRef[Any]],
        deadline: float,
        collect: Callable[[list[Any]], Any],
        ranks: Sequence[RankProcess],
        durations: MutableSequence[float],
    ) -> None:
        """`refs` has one entry per rank that runs the method; the call fails after `deadline` seconds.

        `ranks` are the known processes of the group. `durations` has the seconds of previous calls of this
        method; this call's duration is appended.
        """
        self.name, self.method, self.refs, self.deadline, self.collect = name, method, refs, deadline, collect
        self.ranks, self.durations = ranks, durations
        self.start, self.since = time.monotonic(), time.time()
        self._warned = False

    @signals_pass()
    def get(self) -> Any:
        """Waits for the ranks and returns their combined result.

        Raises a rank's RollforwardError unchanged, since its kind decides about a retry; WorkerError for an unexpected
        exception of a rank, WorkerLost if a rank died, and Stalled if one did not answer within the deadline.
        """
        results: dict[ray.ObjectRef[Any], Any] = {}
        failures: dict[ray.ObjectRef[Any], RayError] = {}
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
                raise stalled(self.name, self.method, self._ranks_of(pending), self.ranks, self.deadline, self.since)
            self._warn_if_slow(pending)
        self.durations.append(self._seconds)
        progress()
        return self.collect([results[ref] for ref in self.refs])

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return self._seconds > self.deadline

    def settled(self) -> bool:
        """Whether `get` would return or raise at once: all ranks are done, one failed, or the deadline has passed."""
        done, pending = ray.wait(self.refs, num_returns=len(self.refs), timeout=0)
        self._warn_if_slow(pending)
        return not pending or self.late or bool(self._fetch(done, {}))

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self.start

    def _ranks_of(self, refs: list[ray.ObjectRef[Any]]) -> list[int]:
        return [rank for rank, ref in enumerate(self.refs) if ref in refs]

    def _warn_if_slow(self, pending: list[ray.ObjectRef[Any]]) -> None:
        """Logs a warning, once, if the call takes unusually long."""
        usual = max(UNUSUAL * median(self.durations), UNUSUAL_S) if self.durations else self.deadline / 2
        if pending and not self._warned and self._seconds > usual:
            self._warned = True
            logger.warning(
                "still waiting for %s.%s on rank(s) %s, since %s; the deadline is %.0f s (trainer.call_timeout_s)",
                self.name, self.method, self._ranks_of(pending), clock(self.since), self.deadline,
            )  # fmt: skip

    def _fetch(
        self, done: list[ray.ObjectRef[Any]], results: dict[ray.ObjectRef[Any], Any]
    ) -> dict[ray.ObjectRef[Any], RayError]:
        """Adds the results of successful calls to `results`; returns the errors of the failed ones."""
        # The result may have to be transferred from another machine.
        timeout_s = min(max(self.deadline - self._seconds, POLL), threading.TIMEOUT_MAX)
        try:
            results |= zip(done, ray.get(done, timeout=timeout_s), strict=True)
            return {}
        except RayError:
            pass
        failures = {}
        for ref in done:
            try:
                results[ref] = ray.get(ref, timeout=timeout_s)
            except RayError as error:
                failures[ref] = error
        return failures

    def _raise(self, failures: dict[ray.ObjectRef[Any], RayError]) -> None:
        """Raises the root cause: an error of a rank itself, otherwise a lost rank, otherwise a broken collective."""
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


@signals_pass()
def first_settled(calls: Sequence[Call]) -> Call:
    """Waits until one of the calls is settled and returns it; the first in the list if several are."""
    refs = list(dict.fromkeys(ref for call in calls for ref in call.refs))
    while True:
        for call in calls:
            if call.settled():
                return call
        _, pending = ray.wait(refs, num_returns=len(refs), timeout=0)
        ray.wait(pending, num_returns=1, timeout=POLL)


def finish_together(calls: Sequence[Call]) -> None:
    """Waits for calls that depend on each other; raises the first error, even if other calls then hang."""
    waiting = list(calls)
    while waiting:
        call = first_settled(waiting)
        call.get()
        waiting.remove(call)


def _is_loss(error: RayError) -> bool:
    return not isinstance(error, RayTaskError)


def _is_consequence(error: RayError) -> bool:
    """Whether a rank's error only results from the death of another rank."""
    if not isinstance(error, RayTaskError) or isinstance(error.cause, RollforwardError):
        return False
    return BROKEN_COLLECTIVE.search(f"{type(error.cause).__name__}: {error.cause}") is not None
