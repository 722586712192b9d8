"""Lineage of a version (run, settings, rows, code, parent versions, decision), and lookup of versions by any of it."""

from typing import Any

from rl_core.errors import InputError, RollforwardError
from rl_core.storage import run_files
from rl_core.storage.store import Store
from tasks.registry.registry import Registry
from tasks.registry.versions import TAG_PREFIX, VersionInfo
from tasks.tracking.tracker import mlflow_client, mlflow_errors

MODELS = "models:/"
ALSO_PREFIX = "also."
"""Prefix of tags that name other runs with identical weights; the value is the step."""
MIN_HASH_LENGTH = 8
"""Minimum number of characters of an abbreviated hash."""


def find_versions(registry: Registry, query: str) -> list[VersionInfo]:
    """The version with this number or alias, or those of a run or a hash (config, data or checkpoint), newest first.

    A hash may be abbreviated to `MIN_HASH_LENGTH` characters. Raises `InputError` if there are none.
    """
    versions = registry.versions()
    named = [info for info in versions if query == info.version or query in info.aliases]
    found = named or [info for info in versions if _matches(info, query)]
    return found or [registry.get(query)]  # raises the error that lists all versions


def _matches(info: VersionInfo, query: str) -> bool:
    hashes = (info.tags.get(key, "") for key in ("config_hash", "data_hash", "checkpoint"))
    return (
        query == info.run
        or ALSO_PREFIX + query in info.tags
        or (len(query) >= MIN_HASH_LENGTH and any(each.startswith(query) for each in hashes))
    )


def versions_with_tag(uri: str, key: str, value: str) -> list[str]:
    """`models:/NAME/VERSION` of each version with the tag in the MLflow at `uri`, oldest first."""
    quoted = value.replace("'", "''")
    with mlflow_errors(uri):
        found = mlflow_client(uri).search_model_versions(f"tags.`{TAG_PREFIX}{key}` = '{quoted}'")
    return [f"{MODELS}{each.name}/{each.version}" for each in sorted(found, key=lambda each: each.creation_timestamp)]


def lineage(registry: Registry, version_or_alias: str) -> dict[str, Any]:
    """Everything known about a version, as JSON values.

    Keys: `model version aliases created tags moves parents children run data evaluation decision rollouts missing`.
    `parents` starts with the model that the version was trained from and ends with the base model. Information that
    can no longer be read, such as a deleted run folder, is None, with a message in `missing`.
    """
    info = registry.get(version_or_alias)
    missing: list[str] = []
    store = info.tags.get("store")
    stored = _read_run(Store(store), info, missing) if store else {}
    if store is None:
        missing.append("the version has no tag with the location of its run")
    return {
        "model": registry.name,
        "version": info.version,
        "aliases": list(info.aliases),
        "created": info.created.isoformat(),
        "tags": dict(info.tags),
        "moves": [vars(move) for move in registry.moves() if info.version in (move.version, move.before)],
        "parents": _parents(registry, info, missing),
        "children": versions_with_tag(registry.uri, "parent", f"{MODELS}{registry.name}/{info.version}"),
        **{key: stored.get(key) for key in ("run", "data", "evaluation", "decision", "rollouts")},
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
            missing.append(f"{parent}, the parent, is no longer registered")
            return [*chain, {"name": parent, "hash": info.tags.get("parent_hash")}]
        chain.append({"name": parent, "run": info.run, "step": info.step, "score": info.score_after})
    return chain


def _read_run(store: Store, info: VersionInfo, missing: list[str]) -> dict[str, Any]:
    """The part of the lineage stored in the run's folder; appends a message to `missing` for each unreadable file."""

    def read(rel: str) -> Any:
        try:
            return store.read_json(rel)
        except FileNotFoundError:
            missing.append(f"{store.url}/{rel} does not exist")
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
