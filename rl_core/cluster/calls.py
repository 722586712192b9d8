"""A method that the ranks of a group are running: waiting for it, and saying why it failed."""

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

# Seconds between looks at the clock while waiting; a signal is answered within this time.
POLL = 0.25
# Seconds that a broken collective has to be explained by the error of another rank, or by its death.
GRACE = 5.0
# A call that takes so many times as long as it mostly does, and at least so many seconds, is told of while it is
# waited for; the first of its kind when half of its deadline is over.
UNUSUAL, UNUSUAL_S = 10.0, 60.0
# What the collectives of a rank say when another rank has gone.
BROKEN_COLLECTIVE = re.compile(r"gloo|nccl|ProcessGroup|TCPStore|connection (was )?(closed|reset)|broken pipe", re.I)
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Call:
    """The handle of a call; `get` waits for its result, and may be called once other calls are under way."""

    def __init__(
        self,
        name: str,
        method: str,
        refs: list[ray.ObjectRef[Any]],
        deadline: float,
        collect: Callable[[list[Any]], Any],
        ranks: Sequence[RankProcess],
        earlier: MutableSequence[float],
    ) -> None:
        """`refs` has one entry a rank that runs the method; `deadline` seconds from now the call has failed.

        `ranks` are the processes of the group, as far as they are known; `earlier` has the seconds that calls of this
        method took, and gets this one's.
        """
        self.name, self.method, self.refs, self.deadline, self.collect = name, method, refs, deadline, collect
        self.ranks, self.earlier = ranks, earlier
        self.start, self.since = time.monotonic(), time.time()
        self._warned = False

    @signals_pass()
    def get(self) -> Any:
        """The result, joined from the ranks.

        Raises a rank's own error as what it is, so that its kind decides about a retry, WorkerError for what a rank
        raised unforeseen, WorkerLost when a rank was lost, and Stalled when one did not answer within the deadline.
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
        self.earlier.append(self._seconds)
        progress()
        return self.collect([results[ref] for ref in self.refs])

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return self._seconds > self.deadline

    def settled(self) -> bool:
        """Whether `get` has nothing to wait for: all ranks are done, one has failed, or the deadline has passed."""
        done, pending = ray.wait(self.refs, num_returns=len(self.refs), timeout=0)
        self._warn_if_slow(pending)
        return not pending or self.late or bool(self._fetch(done, {}))

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self.start

    def _ranks_of(self, refs: list[ray.ObjectRef[Any]]) -> list[int]:
        return [rank for rank, ref in enumerate(self.refs) if ref in refs]

    def _warn_if_slow(self, pending: list[ray.ObjectRef[Any]]) -> None:
        """Says once that the call takes unusually long."""
        usual = max(UNUSUAL * median(self.earlier), UNUSUAL_S) if self.earlier else self.deadline / 2
        if pending and not self._warned and self._seconds > usual:
            self._warned = True
            logger.warning(
                "still waiting for %s.%s on rank(s) %s, since %s; the deadline is %.0f s (trainer.call_timeout_s)",
                self.name, self.method, self._ranks_of(pending), clock(self.since), self.deadline,
            )  # fmt: skip

    def _fetch(
        self, done: list[ray.ObjectRef[Any]], results: dict[ray.ObjectRef[Any], Any]
    ) -> dict[ray.ObjectRef[Any], RayError]:
        """Adds the results of calls that have ended; returns the errors of the others."""
        # A result that is there may lie on another machine.
        patience = min(max(self.deadline - self._seconds, POLL), threading.TIMEOUT_MAX)
        try:
            results |= zip(done, ray.get(done, timeout=patience), strict=True)
            return {}
        except RayError:
            pass
        failures = {}
        for ref in done:
            try:
                results[ref] = ray.get(ref, timeout=patience)
            except RayError as error:
                failures[ref] = error
        return failures

    def _raise(self, failures: dict[ray.ObjectRef[Any], RayError]) -> None:
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


@signals_pass()
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
