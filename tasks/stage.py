"""The decorator of every stage: a Prefect task that is retried from the last commit, for transient errors only."""

import inspect
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from rl_core.errors import Stalled, TransientError
from tasks.session.session import Session, current_session

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


def stage(
    name: str, detail: str = ""
) -> Callable[[Callable[Concatenate[Session, Parameters], Result]], Callable[Parameters, Result]]:
    """Makes a function of a session a stage: callers leave the session out, `stage` passes that of the running flow.

    A stage is printed as it runs and retried with fresh workers. `detail` is what the printed line says of the stage's
    arguments, in the form of `str.format`. The store's manifests record what is done, so Prefect caches nothing.
    """

    def decorate(function: Callable[Concatenate[Session, Parameters], Result]) -> Callable[Parameters, Result]:
        @wraps(function)
        def attempt(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            session, start = current_session(), time.monotonic()
            session.telemetry.status.stage(name)
            session.console.stage(name, detail.format(*args, **kwargs))
            try:
                result = function(session, *args, **kwargs)
            except TransientError as error:
                session.failures.append(_ending(session, error))
                session.console.note(f"{name} failed and may be tried again: {error}")
                if isinstance(error, Stalled):
                    session.console.note(f"stacks: {session.telemetry.record_hang(error.report)}")
                session.workers.drop()
                raise
            session.console.done(name, time.monotonic() - start)
            return result

        # Prefect binds a task's arguments to its signature, to which the session does not belong.
        signature = inspect.signature(function)
        attempt.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=list(signature.parameters.values())[1:]
        )
        prefect_task = task(name=name, cache_policy=NO_CACHE, persist_result=False, retry_condition_fn=is_transient)(
            attempt
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
    status = session.telemetry.status.status
    where = f" at step {status.step + 1}, {status.phase}" if status.phase else ""
    return f"{type(error).__name__}{where}"


def _given_up(name: str, endings: Sequence[str]) -> str:
    same = len(set(endings)) == 1 and len(endings) > 1
    how = f"each with {endings[0]}" if same else "; ".join(endings)
    return f"{name} was given up after trainer.max_attempts={len(endings)} attempts: {how}"
