"""Commands on registered models: models, lineage, promote, rollback, copy, ui."""

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from flows.cli.base import Commands, add_command, add_registry_options, registry_of, shown_secret
from flows.home import home_folder, prepare_home, registry_uri
from rl_core.console import Console, clean

if TYPE_CHECKING:
    from tasks.registry.registry import Registry
    from tasks.registry.versions import VersionInfo


def register(commands: Commands) -> None:
    """Adds the commands."""
    sub = add_command(commands, "models", models, "List the registered versions of a model.")
    add_registry_options(sub, "all")
    sub = add_command(
        commands, "lineage", lineage, "Show a version's origin: run, config, data, code and parent models."
    )
    sub.add_argument(
        "version", metavar="VERSION|RUN|HASH", help="number, alias, run, or hash of config, data or weights"
    )
    sub.add_argument("--json", action="store_true", help="print everything as JSON")
    add_registry_options(sub)
    sub = add_command(commands, "promote", promote, "Make a version the champion.")
    sub.add_argument("version", help="number or alias of a version")
    sub.add_argument("--approve", action="store_true", help="approve a version awaiting approval")
    sub.add_argument("--force", action="store_true", help="promote a version refused by the gate")
    add_registry_options(sub)
    add_registry_options(add_command(commands, "rollback", rollback, "Restore the previous champion."))
    sub = add_command(commands, "copy", copy, "Copy a version to another registered model or another MLflow.")
    sub.add_argument("version", help="number or alias of a version")
    sub.add_argument("--to", required=True, metavar="NAME", help="target registered model")
    sub.add_argument("--to-uri", metavar="URI", help="target MLflow (default: the same)")
    add_registry_options(sub)
    sub = add_command(commands, "ui", ui, "Serve the MLflow UI of this home folder.")
    sub.add_argument("--port", type=int, default=5000)


def models(options: argparse.Namespace, console: Console) -> None:
    """Prints the versions of a registered model, or of all of them."""
    uri = registry_uri(options.tracking_uri)
    from tasks.registry.registry import Registry, model_names

    names = [options.model] if options.model else model_names(uri)
    for name in names:
        _print_versions(Registry(uri, name), console)
    if not names:
        console.note(f"no registered model in MLflow at {uri}; register one with `rollforward run`")


def _print_versions(registry: "Registry", console: Console) -> None:
    since = {move.version: move.at for move in registry.moves()}
    rows = [(f"version {info.version}", _line(info, since.get(info.version))) for info in registry.versions()]
    console.table(rows or [("none", "register one with `rollforward run`")], f"Model {registry.name}")


def _line(info: "VersionInfo", champion_at: str | None) -> str:
    """A version in one line; `champion_at` is the time when it last became champion."""
    parts = [
        f"score {_score(info)}" if info.score_after is not None else "",
        f"step {info.step}  run {info.run}  {info.created:%Y-%m-%d %H:%M}",
        f"gate {info.tags['gate']}" if "gate" in info.tags else "",
        f"forced {_minute(info.tags['forced'])}" if "forced" in info.tags else "",
        f"rolled back {_minute(info.tags['rolled_back'])}" if "rolled_back" in info.tags else "",
        " ".join(info.aliases),
        f"since {_minute(champion_at)}" if champion_at and "champion" in info.aliases else "",
    ]
    return clean("  ".join(part for part in parts if part))


def _score(info: "VersionInfo") -> str:
    low, high = info.tags.get("score_low"), info.tags.get("score_high")
    interval = f" [{float(low):.3f}, {float(high):.3f}]" if low and high else ""
    return f"{info.score_after:.3f}{interval}"


def _minute(iso: str) -> str:
    return iso[:16].replace("T", " ")


def lineage(options: argparse.Namespace, console: Console) -> None:
    """Prints the lineage of a version, or of each version of a run or hash."""
    registry = registry_of(options)
    from tasks.registry.lineage import find_versions
    from tasks.registry.lineage import lineage as known

    found = [known(registry, info.version) for info in find_versions(registry, options.version)]
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for facts in found:
        title = f"Version {facts['version']} of {facts['model']}"
        console.table([(name, clean(text)) for name, text in _lineage_rows(facts) if text], title)


def _lineage_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    tags = facts["tags"]
    packages = json.loads(tags.get("packages", "{}"))
    rollouts = facts["rollouts"]
    return [
        ("alias", ", ".join(facts["aliases"])),
        ("scores", _scores(tags)),
        ("gate", _gate(tags, facts["decision"])),
        ("champion", "\n".join(_move(move, facts["version"]) for move in facts["moves"])),
        ("weights", tags.get("checkpoint", "")),
        ("parents", "\n".join(_parent(parent) for parent in facts["parents"])),
        ("children", "\n".join(facts["children"])),
        ("copied from", " in ".join(tags[key] for key in ("copied_from", "copied_from_uri") if key in tags)),
        ("run", f"{tags.get('run')}, step {tags.get('step')}, in {tags.get('store', 'unknown location')}"),
        ("same weights", _also(tags)),
        ("config", f"{tags.get('config_hash')}, recipe {tags.get('recipe', 'unknown')}"),
        ("data", _data(tags, facts["data"])),
        ("code", tags.get("code_version", "")),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages.items())),
        ("rollouts", f"{rollouts['steps']} steps in {rollouts['folder']}" if rollouts else ""),
        ("MLflow run", tags.get("mlflow_run", "")),
        ("flow run", tags.get("flow_run", "")),
        ("missing", "\n".join(facts["missing"])),
    ]


def _scores(tags: dict[str, str]) -> str:
    kinds = {"greedy": "score", "sampled": "sampled"}
    pairs = {kind: (tags.get(f"{key}_before"), tags.get(f"{key}_after")) for kind, key in kinds.items()}
    return "  ".join(f"{kind} {float(a):.3f} → {float(b):.3f}" for kind, (a, b) in pairs.items() if a and b)


def _gate(tags: dict[str, str], decision: dict[str, Any] | None) -> str:
    """The verdict and its checks."""
    checks = decision["checks"] if decision else []
    return "\n".join([tags.get("gate", ""), *(f"{'✓' if each['passed'] else '✗'} {each['words']}" for each in checks)])


def _move(move: dict[str, Any], version: str) -> str:
    if move["version"] == version:
        before = f", after version {move['before']}" if move["before"] else ""
        return f"since {_minute(move['at'])}: {move['why']} by {move['by']}{before}"
    return f"until {_minute(move['at'])}: version {move['version']} {move['why']} by {move['by']}"


def _parent(parent: dict[str, Any]) -> str:
    if "hash" in parent:
        return f"{parent['name']}, weights {(parent['hash'] or 'unknown')[:16]}"
    score = "" if parent["score"] is None else f", score {parent['score']:.3f}"
    return f"{parent['name']}, run {parent['run']}, step {parent['step']}{score}"


def _also(tags: dict[str, str]) -> str:
    runs = {key.removeprefix("also."): step for key, step in tags.items() if key.startswith("also.")}
    return ", ".join(f"run {run}, step {step}" for run, step in runs.items())


def _data(tags: dict[str, str], data: dict[str, Any] | None) -> str:
    lines = [str(tags.get("data_hash"))]
    if data:
        sources = " and ".join(source["source"] for source in data["sources"])
        lines.append(f"{data['train_rows']:,} training rows, {data['val_rows']:,} held out, of {sources}")
        lines += [f"{name}  {mark}" for name, mark in data["files"].items()]
    return "\n".join(lines)


def promote(options: argparse.Namespace, console: Console) -> None:
    """Moves the alias `champion`."""
    registry = registry_of(options)
    old, new = registry.promote_manually(options.version, options.approve, options.force)
    before = " (unchanged)" if old == new else f" (previously version {old})" if old else ""
    console.note(f"champion of {registry.name}: version {new}{before}")


def rollback(options: argparse.Namespace, console: Console) -> None:
    """Moves the alias `champion` back."""
    registry = registry_of(options)
    old, new = registry.rollback()
    console.note(f"champion of {registry.name}: version {new} (rolled back from version {old})")


def copy(options: argparse.Namespace, console: Console) -> None:
    """Copies a version, once per checkpoint."""
    registry = registry_of(options)
    from tasks.registry.copies import copy_version
    from tasks.tracking.tracker import check_tracking

    if options.to_uri:
        check_tracking(options.to_uri)
    version = copy_version(registry, options.version, options.to, options.to_uri, home_folder() / "cache")
    console.note(f"version {version} of {options.to}" + (f" in {options.to_uri}" if options.to_uri else ""))


def ui(options: argparse.Namespace, console: Console) -> None:
    """Replaces this process by an MLflow server on the home folder's database."""
    home = prepare_home(verbose=True)
    from flows.server.apps import serve_command
    from flows.server.ports import check_port
    from tasks.tracking.login import USER

    check_port(options.port)
    console.note(f"MLflow UI: http://127.0.0.1:{options.port}  (Ctrl-C to stop)")
    console.note(f"the browser asks for {shown_secret(home, USER)}")
    os.execve(sys.executable, serve_command("mlflow", options.port), {**os.environ, "ROLLFORWARD_HOME": str(home)})
