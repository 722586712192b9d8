"""`rollforward replay`: recomputes a committed or failed step from its rollouts, with the run's settings or others."""

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
# They select the responses, which a replay cannot change.
SAMPLING = ("algorithm.max_generated_batches", "algorithm.when_too_few_groups")


@dataclass(frozen=True)
class StoredStep:
    """The stored part of a step: its metrics, the path of its rollouts, and the error if it failed."""

    metrics: dict[str, Any]
    rollouts: str
    error: str = ""


def replay_step(home: Path, run: str, step: int, settings: Sequence[str], console: Console) -> int:
    """Compares the replay of a step with the training step; returns 0, or 1 if they are not equal.

    With `settings` it prints their results next to the original ones and returns 0. For a failed step it also prints
    the error. Raises InputError for a step or setting that cannot be replayed.
    """
    torch.set_num_threads(1)  # as in training: the rounding of sums depends on the number of threads
    sys.path.append(os.getcwd())  # as in a run, for the user's estimators
    store = stored_run(Store(str(home / "runs")), run)
    config = from_dict(store.read_json(run_files.RUN)["config"])
    other = other_config(config, settings)
    stored = _stored_step(store, run, step)
    metrics, where = stored.metrics, stored.rollouts
    trained = load_batch(_rollouts(store, where), config, f"{where} in {store.url}")
    check_recorded(trained, other, f"{where} in {store.url}")
    own_coef = other.algorithm.kl_in_reward_coef
    recorded = own_coef == config.algorithm.kl_in_reward_coef
    replayed, loss = replay(trained, other, metrics.get("kl/coef", own_coef) if recorded else own_coef, step)
    first = metrics.get("actor/first_loss", math.nan)  # missing if the step failed earlier
    if stored.error:
        console.note(f"step {step} failed: {stored.error}")
    if settings:
        _show_other(
            console, settings, describe(trained, first), describe(replayed, loss), correlation(trained, replayed)
        )
        return 0
    lines = compare(trained, first, replayed, loss, config.model.dtype)
    _show(console, lines, f"Replay of step {step} of run {run}, from {where}")
    # The loss, which is last, is ignored if there is none to compare with.
    return 0 if all(c.equal for c in (lines if "actor/first_loss" in metrics else lines[:-1])) else 1


def other_config(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """The run's config with the settings applied; InputError for a setting that a replay cannot change."""
    other = override(config, settings)
    for key in (text.partition("=")[0].strip() for text in settings):
        if not key.startswith(SECTIONS) or key in SAMPLING:
            raise InputError(
                expected=f"a setting of {', '.join(SECTIONS)} that acts on existing responses",
                seen=key,
                where="--set",
                fix="omit it; to test it, start a run with it",
            )
    return other


def _stored_step(store: Store, run: str, step: int) -> StoredStep:
    committed = committed_step(store)
    if 1 <= step <= committed:
        return StoredStep(Ledger(store).read(step)["metrics"], run_files.rollouts(step))
    if failure := read_failure(store, step):
        return StoredStep(failure["metrics"], run_files.failed_rollouts(step), failure["error"])
    raise InputError(
        expected=f"a committed step, 1 to {committed}" if committed else "a run with committed steps",
        seen=f"step {step}",
        where=f"run {run}",
        fix="choose one of them" if committed else f"resume the run with `rollforward run RECIPE --run {run}`",
    )


def _rollouts(store: Store, where: str) -> bytes:
    try:
        return store.read_bytes(where)
    except FileNotFoundError:
        raise InputError(
            expected="the rollouts of the step", seen="no file", where=f"{where} in {store.url}", fix="restore the file"
        ) from None


def _show(console: Console, lines: Sequence[Comparison], title: str) -> None:
    rows = [
        (c.quantity, f"{c.trained:.6g}", f"{c.replayed:.6g}", f"{c.difference:.1e}", "yes" if c.equal else "no")
        for c in lines
    ]
    console.columns([("quantity", "trained", "replayed", "max difference", "equal"), *rows], title)


def _show_other(
    console: Console, settings: Sequence[str], ours: dict[str, float], others: dict[str, float], alike: float
) -> None:
    head = ("quantity", "trained", "replayed")
    rows = [(name, f"{ours[name]:.6g}", f"{others[name]:.6g}") for name in ours]
    last = ("correlation of advantages", "", "none" if math.isnan(alike) else f"{alike:.6g}")
    console.columns([head, *rows, last], f"Replay with {' '.join(settings)}")
