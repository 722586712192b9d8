"""`rollforward replay`: a committed or failed step again from its rollouts, by the run's settings or by others."""

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_core.config.compose import from_dict, override
from rl_core.config.schema import RunConfig
from rl_core.console import Console
from rl_core.errors import InputError
from rl_core.storage import run_files
from rl_core.storage.ledger import Ledger
from rl_core.storage.store import Store
from rl_core.trainer.failed_steps import read_failure
from rl_core.trainer.replay import Comparison, check_recorded, compare, correlation, describe, load_batch, replay
from tasks.runs.run import committed_step, stored_run

SECTIONS = ("algorithm.", "correction.", "actor.")
# They decide which responses there are, and those are given.
SAMPLING = ("algorithm.max_generated_batches", "algorithm.when_too_few_groups")


@dataclass(frozen=True)
class Kept:
    """What is kept of a step: its metrics, its rollouts, and, where it failed, the error."""

    metrics: dict[str, Any]
    rollouts: str
    error: str = ""


def replay_step(home: Path, run: str, step: int, settings: Sequence[str], console: Console) -> int:
    """Shows how the replay compares with what was trained; returns 0, or 1 when they are not equal.

    With `settings` it shows what they would have given instead. Of a step that failed it also says with which error.
    Raises InputError for what cannot be replayed.
    """
    torch.set_num_threads(1)  # as in training: sums of several threads are rounded otherwise
    sys.path.append(os.getcwd())  # where a run finds estimators of the user's own
    store = stored_run(Store(str(home / "runs")), run)
    config = from_dict(store.read_json(run_files.RUN)["config"])
    other = other_config(config, settings)
    kept = _kept(store, run, step)
    metrics, where = kept.metrics, kept.rollouts
    trained = load_batch(_rollouts(store, where), config, f"{where} in {store.url}")
    check_recorded(trained, other, f"{where} in {store.url}")
    own_coef = other.algorithm.kl_in_reward_coef
    recorded = own_coef == config.algorithm.kl_in_reward_coef
    replayed, loss = replay(trained, other, metrics.get("kl/coef", own_coef) if recorded else own_coef, step)
    first = metrics.get("actor/first_loss", math.nan)  # a step may fail before it is known
    if kept.error:
        console.note(f"step {step} failed: {kept.error}")
    if settings:
        _show_other(
            console, settings, describe(trained, first), describe(replayed, loss), correlation(trained, replayed)
        )
        return 0
    lines = compare(trained, first, replayed, loss, config.model.dtype)
    _show(console, lines, f"Step {step} of run {run} again, from {where}")
    # The loss is last; it says nothing where there is none to compare it with.
    return 0 if all(c.equal for c in (lines if "actor/first_loss" in metrics else lines[:-1])) else 1


def other_config(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """The run's config with the settings; InputError for one that a replay cannot change."""
    other = override(config, settings)
    for key in (text.partition("=")[0].strip() for text in settings):
        if not key.startswith(SECTIONS) or key in SAMPLING:
            raise InputError(
                f"a setting under {', '.join(SECTIONS)} that acts on responses that are there",
                key,
                "--set",
                "leave it out; to see what it does, begin a run with it",
            )
    return other


def _kept(store: Store, run: str, step: int) -> Kept:
    committed = committed_step(store)
    if 1 <= step <= committed:
        return Kept(Ledger(store).read(step)["metrics"], run_files.rollouts(step))
    if failure := read_failure(store, step):
        return Kept(failure["metrics"], run_files.failed_rollouts(step), failure["error"])
    raise InputError(
        f"a committed step, 1 to {committed}" if committed else "a run with committed steps",
        f"step {step}",
        f"run {run}",
        "name one of them" if committed else f"continue it with `rollforward run RECIPE --run {run}`",
    )


def _rollouts(store: Store, where: str) -> bytes:
    try:
        return store.read_bytes(where)
    except FileNotFoundError:
        raise InputError("the rollouts of the step", "no file", f"{where} in {store.url}", "restore it") from None


def _show(console: Console, lines: Sequence[Comparison], title: str) -> None:
    rows = [
        (c.quantity, f"{c.trained:.6g}", f"{c.replayed:.6g}", f"{c.difference:.1e}", "yes" if c.equal else "no")
        for c in lines
    ]
    console.columns([("quantity", "trained", "replayed", "largest difference", "equal"), *rows], title)


def _show_other(
    console: Console, settings: Sequence[str], ours: dict[str, float], others: dict[str, float], alike: float
) -> None:
    head = ("quantity", "trained", "otherwise")
    rows = [(name, f"{ours[name]:.6g}", f"{others[name]:.6g}") for name in ours]
    last = ("correlation of the advantages", "", "none" if math.isnan(alike) else f"{alike:.6g}")
    console.columns([head, *rows, last], f"Otherwise: {' '.join(settings)}")
