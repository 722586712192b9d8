"""The main flow: from rows and a model to a trained, evaluated, registered and perhaps promoted version."""

import signal
import time
from concurrent.futures import Future
from functools import wraps
from typing import Any

import httpx
from prefect import flow
from prefect.events.clients import NullEventsClient
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL

from flows.home import home_folder
from flows.preflight import watched
from rl_core.config.compose import compose
from rl_core.console import Console
from rl_core.errors import TransientError
from tasks.evaluate import evaluate, evaluate_champion
from tasks.prepare_data import prepare_data
from tasks.promote import promote, reload
from tasks.register import register
from tasks.registry.registry import CHAMPION
from tasks.report import report
from tasks.runs.run import open_run
from tasks.session import open_session
from tasks.train import train
from tasks.warm_start import warm_start


@flow(name="post-train", flow_run_name="{recipe}", persist_result=False)
def post_train(
    recipe: str,
    overrides: list[str] | None = None,
    run_name: str | None = None,
    resume: bool = False,
    new: bool = False,
    verbose: bool = False,
    keep_data: bool = False,
    stop_at: float | None = None,
) -> dict[str, Any]:
    """Runs all stages of a recipe and returns a summary of JSON values.

    Args:
        recipe: name or path of a recipe. overrides: settings as `a.b=value`.
        run_name: continue or begin this run. resume: continue the run of this config. new: begin another one.
        keep_data: continue on the rows that the run began with, though their files have changed since.
        stop_at: time, in seconds since 1970, after which no further segment of steps begins.
    """
    composed = compose(recipe, overrides or [])
    with watched(composed.config):
        run = open_run(composed, home_folder(), run_name, resume, new)
    with open_session(run, verbose, keep_data) as session:
        config = session.config
        data = prepare_data()
        if config.warm_start.steps:
            warm_start()
        before = evaluate(0)
        step = session.committed_step()
        while step < config.trainer.steps:
            if stop_at is not None and time.time() > stop_at:
                session.console.note(f"the time is used up: training ends at step {step} of {config.trainer.steps}")
                break
            step = train(min(step + config.trainer.segment_steps, config.trainer.steps))
        after = evaluate(step)
        version = register(step, data["data_hash"], before, after)
        evaluate_champion(version)
        reload(version, step)
        aliases = promote(version, step)
        facts = {"step": step, "before": before, "after": after, "version": version, "aliases": aliases, **data}
        page = report(facts)
        return {
            **facts,
            "run": run.name,
            "url": run.url,
            "promoted": CHAMPION in aliases,
            "report": page,
            "model": config.registry.model_name,
            "mlflow_run": session.tracker.run_id,
            "tracking_uri": session.tracking_uri,
        }


def run_here(*arguments: Any) -> dict[str, Any]:
    """The summary of `post_train` in this process, whose outcome counts though Prefect's server is gone by then.

    Stages need no server; the flow tells it how it ended. Raises TransientError when there was none to begin with.
    """
    outcome: Future[dict[str, Any]] = Future()

    @wraps(post_train.fn)
    def stages(*args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the command blocks it while the server starts
            outcome.set_result(post_train.fn(*args, **kwargs))
        except BaseException as error:
            outcome.set_exception(error)
        return outcome.result()

    if not PREFECT_API_URL.value():
        # The run's own server shows them to nobody, and at the exit each would wait for a dead one.
        EventsWorker.set_client_override(NullEventsClient)
    try:
        return flow(name="post-train", flow_run_name="{recipe}", persist_result=False)(stages)(*arguments)
    except (httpx.HTTPError, RuntimeError) as error:  # it has no error of its own for a server that does not start
        if not outcome.done():
            raise TransientError(f"Prefect's server failed: {error}; nothing was begun") from error
        if outcome.exception() is error:
            raise
        Console().note(f"Prefect's server is gone ({error}): its pages do not show how the run ended")
    return outcome.result()
