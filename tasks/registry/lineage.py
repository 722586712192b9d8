"""Where a version comes from: run, settings, rows, code, earlier versions and decision; and back from any of these."""

from typing import Any

from rl_core.errors import InputError, RollforwardError
from rl_core.storage import run_files
from rl_core.storage.store import Store
from tasks.registry.registry import Registry
from tasks.registry.versions import TAG_PREFIX, VersionInfo
from tasks.tracking.tracker import mlflow_client, mlflow_errors

MODELS = "models:/"
ALSO = "also."
"""Beginning of the tags that name further runs which came out at a version's weights, with their step."""
SHORTEST_HASH = 8
"""Characters of a hash that name it."""


def find_versions(registry: Registry, word: str) -> list[VersionInfo]:
    """The version with this number or alias, or those of a run or of a hash (config, data or checkpoint), newest first.

    A hash may be given by its beginning. Raises `InputError` when there are none.
    """
    versions = registry.versions()
    named = [info for info in versions if word == info.version or word in info.aliases]
    found = named or [info for info in versions if _is_of(info, word)]
    return found or [registry.get(word)]  # which says what there is


def _is_of(info: VersionInfo, word: str) -> bool:
    hashes = (info.tags.get(key, "") for key in ("config_hash", "data_hash", "checkpoint"))
    return (
        word == info.run
        or ALSO + word in info.tags
        or (len(word) >= SHORTEST_HASH and any(each.startswith(word) for each in hashes))
    )


def with_tag(uri: str, key: str, value: str) -> list[str]:
    """`models:/NAME/VERSION` of each version in the MLflow at `uri` that has the tag, oldest first."""
    quoted = value.replace("'", "''")
    with mlflow_errors(uri):
        found = mlflow_client(uri).search_model_versions(f"tags.`{TAG_PREFIX}{key}` = '{quoted}'")
    return [f"{MODELS}{each.name}/{each.version}" for each in sorted(found, key=lambda each: each.creation_timestamp)]


def lineage(registry: Registry, version_or_alias: str) -> dict[str, Any]:
    """All that is known of a version, as JSON values.

    Keys: `model version aliases created tags moves parents children run data evaluation decision rollouts missing`.
    `parents` begins with the one that it was trained from and ends with the base model. What cannot be read any more,
    such as the folder of the run, is None, and `missing` has words for it.
    """
    info = registry.get(version_or_alias)
    missing: list[str] = []
    store = info.tags.get("store")
    kept = _kept(Store(store), info, missing) if store else {}
    if store is None:
        missing.append("the version does not say where its run is kept")
    return {
        "model": registry.name,
        "version": info.version,
        "aliases": list(info.aliases),
        "created": info.created.isoformat(),
        "tags": dict(info.tags),
        "moves": [vars(move) for move in registry.moves() if info.version in (move.version, move.before)],
        "parents": _parents(registry, info, missing),
        "children": with_tag(registry.uri, "parent", f"{MODELS}{registry.name}/{info.version}"),
        **{key: kept.get(key) for key in ("run", "data", "evaluation", "decision", "rollouts")},
        "missing": missing,
    }


def _parents(registry: Registry, info: VersionInfo, missing: list[str]) -> list[dict[str, Any]]:
    """The chain of versions down to the base model; each has `name`, and `run`, `step` and `score` or `hash`."""
    chain: list[dict[str, Any]] = []
    while parent := info.tags.get("parent"):
        if not parent.startswith(MODELS):
            return [*chain, {"name": parent, "hash": info.tags.get("parent_hash")}]
        if any(parent == each["name"] for each in chain):
            break
        name, _, version = parent.removeprefix(MODELS).rpartition("/")
        try:
            info = Registry(registry.uri, name).get(version)
        except InputError:
            missing.append(f"{parent}, which it was trained from, is not registered any more")
            return [*chain, {"name": parent, "hash": info.tags.get("parent_hash")}]
        chain.append({"name": parent, "run": info.run, "step": info.step, "score": info.score_after})
    return chain


def _kept(store: Store, info: VersionInfo, missing: list[str]) -> dict[str, Any]:
    """What the folder of the run tells; adds to `missing` what cannot be read."""

    def read(rel: str) -> Any:
        try:
            return store.read_json(rel)
        except FileNotFoundError:
            missing.append(f"{store.url}/{rel} is not there")
        except RollforwardError as error:
            missing.append(
                f"{store.url}/{rel} cannot be read: {error.seen if isinstance(error, InputError) else error}"
            )
        return None

    run = read(run_files.RUN)
    if run is None:
        return {}
    manifest = read(f"{run_files.DATA}/{run_files.MANIFEST}")
    steps = {"before": 0, "after": info.step or 0}
    rollouts = [name for name in store.listdir(run_files.ROLLOUTS) if name.endswith(".parquet")]
    return {
        "run": run,
        "data": manifest and manifest["meta"],
        "evaluation": {when: read(run_files.evaluation(step)) for when, step in steps.items()},
        "decision": read(run_files.DECISION) if "gate" in info.tags else None,
        "rollouts": {"folder": f"{store.url}/{run_files.ROLLOUTS}", "steps": len(rollouts)},
    }
