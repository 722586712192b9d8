"""Stages: reload the registered version, and move the alias `champion` if the gate allows it."""

import json
import statistics
from typing import Any

from rl_core.cluster.resources import worker_env
from rl_core.console import clean
from rl_core.evaluation.constant import constant_score
from rl_core.evaluation.gate import Decision, decide
from rl_core.evaluation.reload import Question, reload_test
from rl_core.rollout.weights.canary import log_prob_limit
from rl_core.storage import run_files
from rl_core.storage.manifest import Json
from tasks.evaluate import champion_result
from tasks.registry.registry import CHAMPION
from tasks.runs.run import last_records
from tasks.session.session import Session
from tasks.stage import stage

GUARD_STEPS = 10
"""Number of last steps over which the training guards average a metric."""
TAG_LENGTH = 5000
"""Tag length in characters that every MLflow store accepts."""

PROMOTED, WAITING, REFUSED = "promoted", "waiting", "refused"
"""Values of a version's tag `rollforward.gate`."""
WOULD = {PROMOTED: "would promote", WAITING: "would wait", REFUSED: "would refuse"}
"""Values of that tag after a dry run, by what would have been decided."""


@stage("reload", "version {0}")
def reload(session: Session, version: str, step: int) -> None:
    """Loads the version from the registry in a new process, once; the gate judges a failure."""
    config = session.config
    if config.gate.mode == "off" or not config.gate.reload:
        session.console.note("gate.reload is off" if config.gate.mode != "off" else "gate.mode is off")
        return
    if _stored_reload(session, version) is None:
        canary = session.store.read_json(run_files.CANARY)
        turns = session.store.read_json(run_files.evaluation(step))["first_turns"]
        question = Question(
            str(session.assets.download_version(version)),
            config.rollout.engine,
            config.model.dtype,
            config.max_length,
            config.rollout.tensor_parallel_size,
            config.rollout.gpu_memory_utilization,
            canary["token_ids"],
            canary["log_probs"],
            turns,
        )
        session.workers.drop()  # the new process needs their devices
        found = reload_test(question, worker_env(config.trainer), config.trainer.call_timeout_s)
        # Runs of earlier versions did not record the rounding error.
        found["rounding"] = canary.get("rounding", 0.0)
        session.store.write_json(run_files.RELOAD, {"version": version, **found})
    found = session.store.read_json(run_files.RELOAD)
    session.console.note(
        found.get("problem")
        or f"max log-prob difference {float(found['log_prob_difference']):.2}; "
        f"max greedy gap {float(found['greedy_gap']):.2}"
    )


@stage("promote", "version {0}")
def promote(session: Session, version: str, step: int) -> list[str]:
    """Compares the version with the current champion and promotes it if the gate allows; returns its aliases."""
    _promote(session, version, step)
    return list(session.registry.get(version).aliases)


def _promote(session: Session, version: str, step: int) -> None:
    registry, gate = session.registry, session.config.gate
    if gate.mode == "off":
        session.console.note("not promoted: gate.mode is off")
        return
    if registry.aliases().get(CHAMPION) == version:
        registry.promote(version)  # an earlier attempt may have ended before it recorded the move
        session.console.note(f"version {version} is already the champion")
        return
    if any(version in (move.version, move.before) for move in registry.moves()):
        # That decision stands, and so does a rollback since then.
        session.console.note(
            f"not promoted: version {version} was champion before; to promote it again: rollforward promote {version}"
        )
        return
    champion = champion_result(session, version)
    candidate = session.store.read_json(run_files.evaluation(step))
    first = champion is None and gate.min_score is None
    decision = decide(
        candidate,
        champion,
        last_metrics(last_records(session.store, GUARD_STEPS)),
        gate,
        _reload_result(session, version),
        _constant(session, candidate["data"]) if first else None,
    )
    for line in decision.words:
        session.console.note(clean(line))  # a line may contain the name of a data source
    verdict = _verdict(decision, gate.approval)
    _record_decision(session, version, champion["version"] if champion else None, decision, verdict)
    if verdict == PROMOTED:
        registry.promote(version)
    session.console.note(_verdict_text(verdict, version))


def last_metrics(records: list[dict[str, Any]]) -> dict[str, float]:
    """Mean of each metric over the records that have it."""
    found = [record["metrics"] for record in records]
    names = {name for metrics in found for name in metrics}
    return {name: statistics.fmean(metrics[name] for metrics in found if name in metrics) for name in names}


def _verdict(decision: Decision, approval: bool) -> str:
    if decision.promote:
        verdict = WAITING if approval else PROMOTED
    else:
        verdict = WAITING if decision.awaits_approval else REFUSED
    return WOULD[verdict] if decision.mode == "dry_run" else verdict


def _verdict_text(verdict: str, version: str) -> str:
    return {
        PROMOTED: f"promoted: version {version} is the champion",
        WAITING: f"not promoted: waiting for approval: rollforward promote {version} --approve",
        REFUSED: "not promoted: not all checks passed",
        WOULD[PROMOTED]: "not promoted: gate.mode is dry_run; all checks passed, it would be promoted",
        WOULD[WAITING]: "not promoted: gate.mode is dry_run; it would wait for approval",
        WOULD[REFUSED]: "not promoted: gate.mode is dry_run; not all checks passed, it would be refused",
    }[verdict]


def _record_decision(session: Session, version: str, champion: str | None, decision: Decision, verdict: str) -> None:
    """Stores the decision in the run's folder, in the MLflow run, and in tags of the version."""
    kept = {"version": version, "champion": champion, "verdict": verdict, **decision.as_json()}
    session.store.write_json(run_files.DECISION, kept)
    session.tracking.tracker.log_file(json.dumps(kept, indent=1, ensure_ascii=False), "decision.json")
    tags = {"gate_mode": decision.mode, "gate_champion": champion or "none"}
    tags["gate_checks"] = "\n".join(decision.words)[:TAG_LENGTH]
    session.registry.set_tags(version, {**tags, "gate": verdict})


def _constant(session: Session, data: str) -> float | None:
    """The score of the best constant answer on the rows of this hash, computed once: a retry decides the same."""
    kept = session.store.read_json(run_files.CONSTANT) if session.store.exists(run_files.CONSTANT) else None
    if kept is None or kept["data"] != data:
        kept = {"data": data, "score": constant_score(session.config, session.assets.val_rows.rows)}
        session.store.write_json(run_files.CONSTANT, kept)
    score: float | None = kept["score"]
    return score


def _stored_reload(session: Session, version: str) -> Json | None:
    """The result of this version's reload test, if it has run."""
    found = session.store.read_json(run_files.RELOAD) if session.store.exists(run_files.RELOAD) else None
    return found if found and found["version"] == version else None


def _reload_result(session: Session, version: str) -> Json | None:
    config = session.config
    found = _stored_reload(session, version) if config.gate.reload else None
    if found is None:
        return None
    limit = log_prob_limit(config.rollout.canary_tolerance, found.get("rounding", 0.0))
    return {**found, "tolerance": config.gate.reload_tolerance or limit}
