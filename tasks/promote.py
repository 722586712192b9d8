"""Stages: the registered version loaded again, and the alias champion moved when the gate allows it."""

import json
import statistics
from typing import Any

from rl_core.cluster.resources import worker_env
from rl_core.console import clean
from rl_core.evaluation.gate import Decision, decide
from rl_core.evaluation.reload import Question, reload_test
from rl_core.storage import run_files
from rl_core.storage.store import Json
from tasks.evaluate import champion_result
from tasks.registry.registry import CHAMPION
from tasks.runs.run import committed_records
from tasks.session.session import Session
from tasks.stage import stage

LAST_STEPS = 10
"""Steps whose mean the training guards look at."""
TAG_LENGTH = 5000
"""Characters that MLflow keeps of a tag for certain."""

PROMOTED, WAITING, REFUSED, WOULD, WOULD_NOT = "promoted", "waiting", "refused", "would promote", "would refuse"
"""Values of a version's tag `rollforward.gate`."""


@stage("reload", "version {0}")
def reload(session: Session, version: str, step: int) -> None:
    """Loads the version from the registry in a process of its own, once; a failure is for the gate to judge."""
    config = session.config
    if config.gate.mode == "off" or not config.gate.reload:
        session.console.note("gate.reload is off" if config.gate.mode != "off" else "gate.mode is off")
        return
    if _kept(session, version) is None:
        canary = session.store.read_json(run_files.CANARY)
        turns = session.store.read_json(run_files.evaluation(step))["first_turns"]
        question = Question(
            str(session.assets.download_version(version)),
            config.model.dtype,
            config.max_length,
            config.rollout.tensor_parallel_size,
            config.rollout.gpu_memory_utilization,
            canary["token_ids"],
            canary["log_probs"],
            turns,
        )
        session.workers.drop()  # its process needs their devices
        found = reload_test(question, worker_env(config.trainer), config.trainer.call_timeout_s)
        session.store.write_json(run_files.RELOAD, {"version": version, **found})
    found = session.store.read_json(run_files.RELOAD)
    session.console.note(
        found.get("problem")
        or f"largest difference of log-probs {found['log_prob_difference']:.1e}, of the greedy "
        f"answers' tokens to the likeliest {found['greedy_gap']:.1e}"
    )


@stage("promote", "version {0}")
def promote(session: Session, version: str, step: int) -> list[str]:
    """Decides against the present champion; returns the version's aliases."""
    _promote(session, version, step)
    return list(session.registry.get(version).aliases)


def _promote(session: Session, version: str, step: int) -> None:
    registry, gate = session.registry, session.config.gate
    if gate.mode == "off":
        session.console.note("not promoted: gate.mode is off")
        return
    if registry.aliases().get(CHAMPION) == version:
        registry.promote(version)  # an earlier attempt may have ended before it wrote the move down
        session.console.note(f"version {version} is the champion already")
        return
    if any(version in (move.version, move.before) for move in registry.moves()):
        # What was decided then stands, and so does a rollback since.
        session.console.note(f"version {version} was the champion before: rollforward promote {version}")
        return
    champion = champion_result(session, version)
    decision = decide(
        session.store.read_json(run_files.evaluation(step)),
        champion,
        last_metrics(committed_records(session.store)),
        gate,
        _reload_found(session, version),
    )
    for line in decision.words:
        session.console.note(clean(line))  # it may hold the name of a data source
    verdict = _verdict(decision, gate.approval)
    _keep(session, version, champion["version"] if champion else None, decision, verdict)
    if verdict == PROMOTED:
        registry.promote(version)
    session.console.note(_words(verdict, version))


def last_metrics(records: list[dict[str, Any]]) -> dict[str, float]:
    """Mean of each metric over the last steps that have it."""
    last = [record["metrics"] for record in records[-LAST_STEPS:]]
    names = {name for metrics in last for name in metrics}
    return {name: statistics.fmean(metrics[name] for metrics in last if name in metrics) for name in names}


def _verdict(decision: Decision, approval: bool) -> str:
    if decision.mode == "dry_run":
        return WOULD if decision.promote else WOULD_NOT
    if not decision.promote:
        return REFUSED
    return WAITING if approval else PROMOTED


def _words(verdict: str, version: str) -> str:
    return {
        PROMOTED: f"promoted: version {version} is the champion",
        WAITING: f"not promoted: it waits for approval: rollforward promote {version} --approve",
        REFUSED: "not promoted: not all checks passed",
        WOULD: "not promoted: gate.mode is dry_run; all checks passed, so it would be",
        WOULD_NOT: "not promoted: gate.mode is dry_run; not all checks passed, so it would not be either",
    }[verdict]


def _keep(session: Session, version: str, champion: str | None, decision: Decision, verdict: str) -> None:
    """The decision in the run's folder, in MLflow's run, and as tags of the version."""
    kept = {"version": version, "champion": champion, "verdict": verdict, **decision.as_json()}
    session.store.write_json(run_files.DECISION, kept)
    session.tracking.tracker.log_file(json.dumps(kept, indent=1, ensure_ascii=False), "decision.json")
    tags = {"gate_mode": decision.mode, "gate_champion": champion or "none"}
    tags["gate_checks"] = "\n".join(decision.words)[:TAG_LENGTH]
    session.registry.set_tags(version, {**tags, "gate": verdict})


def _kept(session: Session, version: str) -> Json | None:
    """What the reload of this version found, if it was tried."""
    found = session.store.read_json(run_files.RELOAD) if session.store.exists(run_files.RELOAD) else None
    return found if found and found["version"] == version else None


def _reload_found(session: Session, version: str) -> Json | None:
    config = session.config
    found = _kept(session, version) if config.gate.reload else None
    return found and {**found, "tolerance": config.gate.reload_tolerance or config.rollout.canary_tolerance}
