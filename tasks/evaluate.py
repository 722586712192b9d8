"""Stages: score the policy at a step on the held-out rows, and the champion on the same rows with the same seeds."""

from collections.abc import Callable

from rl_core.console import clean
from rl_core.data.dataset import RLHFDataset
from rl_core.errors import InputError, TrainingError
from rl_core.evaluation import evaluate as evaluation
from rl_core.evaluation.no_progress import is_suspect, score_warnings, training_warnings
from rl_core.models.load import load_tokenizer
from rl_core.reports.model_card import folder_hash, weights_hash
from rl_core.storage import run_files
from rl_core.storage.manifest import Json
from tasks.export import export
from tasks.registry.registry import CHAMPION
from tasks.runs.run import committed_step, last_records, runs_root, sampled_records
from tasks.session.session import Session
from tasks.stage import stage


@stage("evaluate", "policy at step {0}")
def evaluate(session: Session, step: int) -> dict[str, float]:
    """Mean of each metric at `step`, the step that training has reached; computed once."""
    if not session.store.exists(run_files.evaluation(step)):

        def score() -> Json:
            roles, assets = session.workers.train_to(step), session.assets
            return evaluation.evaluate(session.config, assets.val_rows, roles, assets.tokenizer)

        weights = weights_hash(export(session, step)) if step else folder_hash(session.assets.fetch_policy_model())
        session.store.write_json(run_files.evaluation(step), _cached(session, weights, score))
    found = session.store.read_json(run_files.evaluation(step))
    if step:
        for text in _no_progress(session, found):
            session.telemetry.warn_once(text)
    return _report(session, found)


def _no_progress(session: Session, after: Json) -> list[str]:
    store, steps = session.store, committed_step(session.store)
    suspect = any(is_suspect(steps, record["metrics"]) for record in last_records(store, 1))
    records = [record["metrics"] for record in sampled_records(store)] if suspect else []
    return training_warnings(records, steps) + score_warnings(store.read_json(run_files.evaluation(0)), after)


@stage("evaluate champion", "baseline for version {0}")
def evaluate_champion(session: Session, version: str) -> dict[str, float] | None:
    """The champion's scores on the run's held-out rows; None without another champion or if `gate.mode` is off."""
    if session.config.gate.mode == "off":
        session.console.note("gate.mode is off")
        return None
    result = champion_result(session, version)
    if result is None:
        session.console.note("no other champion")
        return None
    if "problem" in result:
        session.console.note(clean(f"version {result['version']} cannot be scored: {result['problem']}"))
        return None
    session.console.note(f"version {result['version']}")
    return _report(session, result)


def champion_result(session: Session, version: str) -> Json | None:
    """The current champion's evaluation and its `version`, computed once; None without one or if it is `version`.

    If the champion cannot be evaluated, the result has a `problem` instead of scores; a retry would not help.
    """
    champion = session.registry.aliases().get(CHAMPION)
    if champion in (None, version):
        return None
    assert champion is not None
    kept: Json | None = (
        session.store.read_json(run_files.CHAMPION) if session.store.exists(run_files.CHAMPION) else None
    )
    if kept is None or kept["version"] != champion:
        try:
            result = _of_version(session, champion)
        except (InputError, TrainingError) as error:
            session.workers.drop()
            result = {"problem": " ".join(str(error).split())}
        session.store.write_json(run_files.CHAMPION, {"version": champion, **result})
    kept = session.store.read_json(run_files.CHAMPION)
    return kept


def _of_version(session: Session, version: str) -> Json:
    weights = session.registry.get(version).checkpoint or folder_hash(session.assets.download_version(version))

    def score() -> Json:
        folder = session.assets.download_version(version)
        roles = session.workers.load_model(folder)
        tokenizer = load_tokenizer(folder)
        rows = RLHFDataset.load(session.store, "val", tokenizer, session.assets.tools_of)
        return evaluation.evaluate(session.config, rows, roles, tokenizer)

    return _cached(session, weights, score)


def _cached(session: Session, weights: str, score: Callable[[], Json]) -> Json:
    """The evaluation of these weights from the cache that all runs share; on a miss, runs `score` and stores it."""
    root = runs_root(session.config.storage, session.run.home)
    data = evaluation.rows_hash(session.assets.val_rows.rows)
    return evaluation.cached(root, weights, data, evaluation.settings_of(session.config), score)


def _report(session: Session, result: Json) -> dict[str, float]:
    scores = {metric: float(result[metric]) for metric in evaluation.METRICS}
    low, high = result["intervals"]["greedy"]
    session.console.note(
        f"greedy {result['greedy']:.3f} ({low:.3f}–{high:.3f})  sampled {result['sampled']:.3f}  "
        f"pass@k {result['pass_at_k']:.3f}  maj@k {result['maj_at_k']:.3f}  on {result['rows']} rows"
    )
    return scores
