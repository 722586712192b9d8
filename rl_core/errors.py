"""The three kinds of errors, which decide whether a stage is retried.

`TransientError` is retried from the last commit, `InputError` and `TrainingError` are not.
"""

from rl_core.credentials import without_credentials


class RollforwardError(Exception):
    """Base of every error that Rollforward raises on purpose; credentials of URLs that its words quote are left out."""

    def __init__(self, *words: str) -> None:
        super().__init__(*map(without_credentials, words))


class TransientError(RollforwardError):
    """Something outside the computation failed (lost worker, storage, deadline); a retry may succeed."""


class WorkerLost(TransientError):
    """A process of the run has gone, or can no longer reach the others of its group."""


class Stalled(TransientError):
    """A call did not answer within its deadline; `report` has the stacks of those who are late."""

    def __init__(self, message: str, report: str) -> None:
        super().__init__(message)
        self.report = report


class InputError(RollforwardError):
    """Config, data, model or environment is not usable as given; retrying cannot help.

    The message is made of what was expected, what was seen, where, and what to do next.
    """

    def __init__(self, expected: str, seen: str, where: str, fix: str) -> None:
        super().__init__(expected, seen, where, fix)
        self.expected, self.seen, self.where, self.fix = self.args

    def __str__(self) -> str:
        return f"expected: {self.expected}\n    seen: {self.seen}\n   where: {self.where}\n     fix: {self.fix}"


class TrainingError(RollforwardError):
    """Training itself went wrong (non-finite loss, weights out of step); state is kept for inspection."""


class WorkerError(TrainingError):
    """A worker raised what nobody foresaw; the message begins with it and has its traceback."""


def short_message(error: BaseException) -> str:
    """How an error reads in a file: what other libraries say may be long, and may hold what no file should."""
    return str(error).partition("\n\n")[0] if isinstance(error, RollforwardError) else type(error).__name__
