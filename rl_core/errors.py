"""The three kinds of errors, which determine whether a stage is retried.

`TransientError` is retried from the last committed step; `InputError` and `TrainingError` are not retried.
"""

import difflib
from collections.abc import Iterable

from rl_core.credentials import without_credentials

NEAR = 0.7
"""Similarity of two names, from 0 to 1, above which one may be meant by the other."""


class RollforwardError(Exception):
    """Base of all errors raised deliberately; credentials in URLs are removed from the message."""

    def __init__(self, *parts: str) -> None:
        super().__init__(*map(without_credentials, parts))


class TransientError(RollforwardError):
    """Something outside the computation failed (lost worker, storage, deadline); a retry may succeed."""


class WorkerLost(TransientError):
    """A process of the run has died or can no longer reach the others of its group."""


class Stalled(TransientError):
    """A call missed its deadline; `report` contains the stacks of the workers that did not return."""

    def __init__(self, message: str, report: str) -> None:
        super().__init__(message)
        self.report = report


class InputError(RollforwardError):
    """Config, data, model or environment is invalid; retrying cannot help.

    The message states what was expected, what was seen, where, and how to fix it.
    """

    def __init__(self, expected: str, seen: str, where: str, fix: str) -> None:
        super().__init__(expected, seen, where, fix)
        self.expected, self.seen, self.where, self.fix = self.args

    def __str__(self) -> str:
        return f"expected: {self.expected}\n    seen: {self.seen}\n   where: {self.where}\n     fix: {self.fix}"


class TrainingError(RollforwardError):
    """Training itself failed (non-finite loss, weights out of sync); state is kept for inspection."""


class WorkerError(TrainingError):
    """Unexpected exception in a worker; the message starts with it and includes the remote traceback."""


def short_message(error: BaseException) -> str:
    """Text of an error to store in files; only the type name for other libraries' errors, which may hold secrets."""
    return str(error).partition("\n\n")[0] if isinstance(error, RollforwardError) else type(error).__name__


def near_names(name: str, names: Iterable[str], most: int = 3) -> list[str]:
    """Known names that a user may have meant by `name`, the most similar first; often none."""
    return difflib.get_close_matches(name, list(names), n=most, cutoff=NEAR)
