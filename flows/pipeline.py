"""The stages in order, for the deployed flow in flows/post_train.py and for `rollforward run`: trains, evaluates,
registers and, if the gate allows, promotes a model."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import httpx
from prefect import flow
from prefect.events.clients import NullEventsClient
from prefect.events.worker import EventsWorker

from rl_core.cluster.local_ray import LocalRay
from rl_core.config.compose import Composed
from rl_core.console import Console
from rl_core.errors import TransientError
from tasks.evaluate import evaluate, evaluate_champion
from tasks.prefect_server.own_server import has_pages
from tasks.prepare_data import prepare_data
from tasks.promote import promote, reload
from tasks.register import register
from tasks.registry.registry import CHAMPION
from tasks.report import report
from tasks.runs.run import Run, committed_step
from tasks.session.session import open_session
from tasks.train import train
from tasks.warm_start import warm_start

Summary = dict[str, Any]


def run_stages(
    run: Run,
    verbose: bool = False,
    keep_data: bool = False,
    stop_at: float | None = None,
    local_ray: LocalRay | None = None,
) -> Summary:
    """Runs all stages of an opened run, within a flow, and returns a summary of JSON values.

    Args:
        verbose: show the logs of the libraries.
        keep_data: use the run's committed rows even if the source files have changed.
        stop_at: time, in seconds since 1970, after which no further segment of steps starts.
        local_ray: a Ray for the workers that is starting already.
    """
    with open_session(run, verbose, keep_data, local_ray) as session:
        config = session.config
        session.console.note(f"rollout engine: {config.rollout.engine}")
        data = prepare_data()
        if config.warm_start.steps:
            warm_start()
        before = evaluate(0)
        step = committed_step(run.store)
        while step < config.trainer.steps:
            if stop_at is not None and time.time() > stop_at:
                session.console.note(f"time budget used up: training ends at step {step} of {config.trainer.steps}")
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
            "mlflow_run": session.tracking.tracker.run_id,
            "tracking_uri": session.tracking.uri,
        }


def run_as_flow(composed: Composed, overrides: list[str], stages: Callable[[], Summary]) -> Summary:
    """Runs `stages` as a flow run in this process and returns their result, even if Prefect's server dies meanwhile.

    The server at PREFECT_API_URL must answer: it is told of the flow run and its final state, and stages need none.
    Raises TransientError if it fails before the stages start.
    """
    outcome: Future[Summary] = Future()

    def body(recipe: str, overrides: list[str]) -> Summary:
        try:
            outcome.set_result(stages())
        except BaseException as error:
            outcome.set_exception(error)
        return outcome.result()

    if not has_pages():
        # Nobody reads the events of the run's own server, and at exit each would wait for a dead server.
        EventsWorker.set_client_override(NullEventsClient)
    try:
        return flow(name="post-train", flow_run_name="{recipe}", persist_result=False)(body)(composed.recipe, overrides)
    except (httpx.HTTPError, RuntimeError) as error:  # Prefect has no specific error for a server that does not start
        if not outcome.done():
            raise TransientError(f"the Prefect server failed: {error}; no stage was started") from error
        if outcome.exception() is error:
            raise
        Console().note(f"the Prefect server is gone ({error}): its pages do not show the final state of the run")
    return outcome.result()
