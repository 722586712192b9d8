"""What every stage is: a Prefect task that is retried for transient errors only, from the last commit."""

import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from rl_core.errors import Stalled, TransientError
from tasks.session import Session, current_session

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Seconds before each further attempt.
BACK_OFF = [2.0, 10.0, 30.0, 60.0]


def is_transient(_task: Task[Any, Any], _run: TaskRun, state: State) -> bool:
    """Whether a failed attempt may succeed when it is repeated."""
    try:
        state.result(raise_on_failure=True)
    except TransientError:
        return True
    except Exception:
        return False
    return False


def stage(name: str, detail: str = "") -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Makes a function of the current session a stage: printed as it passes, retried, with fresh workers each time.

    `detail` is what the printed line says of the stage's arguments, in the form of `str.format`. What is done is
    told by the store's manifests, so Prefect caches nothing.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @wraps(function)
        def body(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            session, start = current_session(), time.monotonic()
            session.status.stage(name)
            session.console.stage(name, detail.format(*args, **kwargs))
            try:
                result = function(*args, **kwargs)
            except TransientError as error:
                session.failures.append(_ending(session, error))
                session.console.note(f"{name} failed and may be tried again: {error}")
                if isinstance(error, Stalled):
                    session.console.note(f"stacks: {session.keep_stall(error.report)}")
                session.drop_workers()
                raise
            session.console.done(name, time.monotonic() - start)
            return result

        prefect_task = task(name=name, cache_policy=NO_CACHE, persist_result=False, retry_condition_fn=is_transient)(
            body
        )

        @wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            session = current_session()
            attempts, session.failures = session.config.trainer.max_attempts, []
            delays = [BACK_OFF[min(i, len(BACK_OFF) - 1)] for i in range(attempts - 1)]
            try:
                return prefect_task.with_options(retries=attempts - 1, retry_delay_seconds=delays)(*args, **kwargs)
            except TransientError as error:
                error.add_note(_given_up(name, session.failures))
                raise

        return call

    return decorate


def _ending(session: Session, error: TransientError) -> str:
    """Where in training an attempt ended, and by which kind of error."""
    status = session.status.status
    where = f" at step {status.step + 1}, {status.phase}" if status.phase else ""
    return f"{type(error).__name__}{where}"


def _given_up(name: str, endings: Sequence[str]) -> str:
    same = len(set(endings)) == 1 and len(endings) > 1
    told = f"each with {endings[0]}" if same else "; ".join(endings)
    return f"{name} was given up after trainer.max_attempts={len(endings)} attempts: {told}"
