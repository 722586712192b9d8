"""The decorator of every stage: makes it a Prefect task that is retried from the last commit on transient errors."""

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

RETRY_DELAYS_S = [2.0, 10.0, 30.0, 60.0]
"""Waits before the second and later attempts; the last one repeats."""


def is_transient(_task: Task[Any, Any], _run: TaskRun, state: State) -> bool:
    """Whether a failed attempt may succeed when retried."""
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
    """Makes a function of a session a stage; `stage` passes the session of the running flow, callers omit it.

    A stage prints its start and end and is retried with fresh workers. `detail` is a `str.format` template for the
    stage's arguments in the printed line. Manifests in the store record what is done, so Prefect caches nothing.
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
                session.console.note(f"{name} failed, may be retried: {error}")
                if isinstance(error, Stalled):
                    session.console.note(f"stacks: {session.telemetry.record_hang(error.report)}")
                session.workers.drop()
                raise
            session.console.done(name, time.monotonic() - start)
            return result

        # Prefect binds a task's arguments to its signature, which must not include the session.
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
            delays = [RETRY_DELAYS_S[min(i, len(RETRY_DELAYS_S) - 1)] for i in range(attempts - 1)]
            try:
                return prefect_task.with_options(retries=attempts - 1, retry_delay_seconds=delays)(*args, **kwargs)
            except TransientError as error:
                error.add_note(_given_up(name, session.failures))
                raise

        return call

    return decorate


def _ending(session: Session, error: TransientError) -> str:
    """The error type that ended an attempt, with the step and phase."""
    status = session.telemetry.status.status
    where = f" at step {status.step + 1}, {status.phase}" if status.phase else ""
    return f"{type(error).__name__}{where}"


def _given_up(name: str, endings: Sequence[str]) -> str:
    same = len(set(endings)) == 1 and len(endings) > 1
    how = f"all with {endings[0]}" if same else "; ".join(endings)
    return f"{name} failed {len(endings)} times (trainer.max_attempts={len(endings)}): {how}"
