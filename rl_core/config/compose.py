"""Composes a recipe and overrides into one validated config and records the layer of each value.

Three layers: the schema's defaults, a recipe (which may build on other recipes), overrides `a.b=value`.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rl_core.config.problems import (
    Fields,
    combination,
    credentials,
    current_name,
    entry_section,
    joined,
    missing_equals,
    not_text,
    unknown_key,
    wrong_value,
)
from rl_core.config.schema import RunConfig
from rl_core.credentials import command_holds_credentials, holds_credentials
from rl_core.errors import InputError, near_names

Scalar = str | int | float | bool | None

RECIPES = Path(__file__).parent / "recipes"

# Storage, tracking, promotion and retry settings do not affect what is learned. They are excluded from a run's
# identity, so a run can be resumed with other values.
RUN_CONTROL_SECTIONS = ("storage.", "tracking.", "registry.", "gate.")
RUN_CONTROL_KEYS = frozenset(
    {
        "trainer.segment_steps",
        "trainer.save_every",
        "trainer.keep_checkpoints",
        "trainer.profile_steps",
        "trainer.max_attempts",
        "trainer.call_timeout_s",
        "trainer.stall_timeout_s",
        "trainer.grace_s",
        "rollout.canary_tolerance",
        "reward.processes",
        "reward.timeout_s",
        "reward.judge.key_env",
        "reward.judge.requests",
        "reward.judge.timeout_s",
        "reward.judge.retries",
    }
)

# Placement on machines and processes: other values give equal results up to rounding, so a run may be resumed with
# them and reports the change.
LAYOUT_SECTION = "fsdp."
LAYOUT_KEYS = frozenset(
    {
        "trainer.nodes",
        "trainer.ranks_per_node",
        "trainer.threads_per_rank",
        "rollout.nodes",
        "rollout.ranks_per_node",
        "rollout.tensor_parallel_size",
        "rollout.max_num_seqs",
        "rollout.kv_cache_gb",
        "rollout.gpu_memory_utilization",
        "actor.max_tokens_per_micro_batch",
        "reward.model.nodes",
        "reward.model.ranks_per_node",
    }
)


@dataclass(frozen=True)
class Composed:
    """A config and its origins, which map each dotted key to `default`, `recipe NAME` or `override`."""

    config: RunConfig
    origins: dict[str, str]
    recipe: str


@dataclass(frozen=True)
class _Value:
    value: Any
    origin: str


def compose(recipe: str, overrides: Sequence[str] = ()) -> Composed:
    """Merge the three layers into a validated config.

    `recipe` is a name from rl_core/config/recipes or a path that ends in .yaml; override values are YAML, and `null`
    unsets. Raises one `InputError` that lists all problems of the layers.
    """
    return _composed(_recipe_values(recipe, Path.cwd(), ()), overrides, recipe)


def extend(composed: Composed, overrides: Sequence[str]) -> Composed:
    """The same config with additional overrides `a.b=value`; the recipe is not read again.

    Raises one `InputError` that lists all problems.
    """
    values = {
        key: _Value(leaf.value, composed.origins[key])
        for key, leaf in _leaves(composed.config.model_dump(mode="json"), "").items()
    }
    return _composed(values, overrides, composed.recipe)


def _composed(values: dict[str, _Value], overrides: Sequence[str], recipe: str) -> Composed:
    problems: list[InputError] = []
    values = values | _override_values(overrides, problems)
    config = _validated(values, f"recipe {recipe} and its overrides", problems)
    return Composed(
        config, {key: values[key].origin if key in values else "default" for key in dotted_fields()}, recipe
    )


def override(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The config with additional settings `a.b=value`; raises one `InputError` that lists all problems."""
    problems: list[InputError] = []
    values = _leaves(config.model_dump(mode="json"), "saved config") | _override_values(overrides, problems)
    return _validated(values, "saved config and its overrides", problems)


def recipe_names() -> list[str]:
    """Names of the recipes included in the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def from_dict(tree: Mapping[str, Any]) -> RunConfig:
    """The config of a nested dictionary as returned by `config.model_dump()`; raises `InputError` if invalid."""
    leaves = {current_name(key): leaf for key, leaf in _leaves(tree, "saved config").items()}
    return _validated(leaves, "saved config", [])


def to_yaml(config: RunConfig) -> str:
    """The config as YAML, usable as a recipe."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


def settings(config: RunConfig) -> dict[str, Any]:
    """All values by dotted key, in the schema's order."""
    return {key: leaf.value for key, leaf in _leaves(config.model_dump(mode="json"), "").items()}


def flatten(config: RunConfig) -> dict[str, Scalar]:
    """The settings with lists and mappings serialised as JSON."""
    return {
        key: json.dumps(value) if isinstance(value, list | dict) else value for key, value in settings(config).items()
    }


def identity(config: RunConfig) -> dict[str, Scalar]:
    """The flattened config without run control and layout, which identifies a run."""
    return {
        key: value
        for key, value in flatten(config).items()
        if key not in RUN_CONTROL_KEYS | LAYOUT_KEYS and not key.startswith((*RUN_CONTROL_SECTIONS, LAYOUT_SECTION))
    }


def layout(config: RunConfig) -> dict[str, Scalar]:
    """The flattened settings for placement on machines and processes."""
    return {
        key: value for key, value in flatten(config).items() if key in LAYOUT_KEYS or key.startswith(LAYOUT_SECTION)
    }


def config_hash(config: RunConfig) -> str:
    """SHA-256 (hexadecimal) of the identity."""
    return hashlib.sha256(json.dumps(identity(config), sort_keys=True).encode()).hexdigest()


def diff(a: RunConfig, b: RunConfig) -> dict[str, tuple[Scalar, Scalar]]:
    """Identity keys whose values differ between two configs, with both values."""
    return _differing(identity(a), identity(b))


def layout_diff(a: RunConfig, b: RunConfig) -> dict[str, tuple[Scalar, Scalar]]:
    """Layout keys whose values differ between two configs, with both values."""
    return _differing(layout(a), layout(b))


def _differing(ours: dict[str, Scalar], theirs: dict[str, Scalar]) -> dict[str, tuple[Scalar, Scalar]]:
    return {key: (ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]}


def _override_values(overrides: Sequence[str], problems: list[InputError]) -> dict[str, _Value]:
    """The values of overrides by dotted key; appends overrides that cannot be parsed to `problems`."""
    values: dict[str, _Value] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            problems.append(missing_equals(text, dotted_fields()))
            continue
        try:
            values |= _leaves({key.strip(): _load(value)}, "override")
        except yaml.YAMLError as error:
            problems.append(_invalid_yaml(error, f"override {text!r}"))
    return values


def dotted_fields(section: type[BaseModel] = RunConfig, prefix: str = "") -> dict[str, FieldInfo]:
    """All fields of the schema by dotted key."""
    fields: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            fields |= dotted_fields(field.annotation, f"{prefix}{name}.")
        else:
            fields[prefix + name] = field
    return fields


_FIELDS = dotted_fields()


def _leaves(tree: Mapping[Any, Any], origin: str, prefix: str = "") -> dict[str, _Value]:
    """The values of a nested mapping by dotted key; a setting may itself be a mapping."""
    leaves: dict[str, _Value] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and current_name(key) not in _FIELDS:
            leaves |= _leaves(value, origin, f"{key}.")
        else:
            leaves[key] = _Value(value, origin)
    return leaves


def _validated(values: Mapping[str, _Value], where: str, problems: list[InputError]) -> RunConfig:
    """The config of dotted values; raises `problems` and all further ones as one error."""
    fields = dotted_fields()
    tree: dict[str, Any] = {}
    with_credentials = [key for key, leaf in values.items() if _holds_credentials(key, leaf.value)]
    problems += [credentials(key, values[key].origin) for key in with_credentials]
    unreadable = [key for key, leaf in values.items() if not _is_text(leaf.value)]
    problems += [not_text(key, values[key].value, values[key].origin) for key in unreadable]
    if unreadable:
        raise joined(problems, where)
    for key, leaf in values.items():
        if leaf.value == {} and any(name.startswith(f"{key}.") for name in fields):
            continue
        if key not in fields:
            problems.append(unknown_key(key, leaf.value, leaf.origin, fields))
            continue
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = leaf.value
    try:
        # Strict, so that true is not a number and 2.0 not an integer; from JSON, so that lists are valid tuples.
        config = RunConfig.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as errors:
        origins = {key: leaf.origin for key, leaf in values.items()}
        reported = set(with_credentials)
        for error in errors.errors():
            if error["type"] == "value_error":
                problems += [combination(text, origins, fields) for text in str(error["ctx"]["error"]).split("; ")]
                continue
            key = next(key for key in fields if error["loc"][: key.count(".") + 1] == tuple(key.split(".")))
            inside = error["loc"][key.count(".") + 1 :]
            key, leaf, options = _located(key, inside, values[key], fields)
            if key not in options:
                problems.append(unknown_key(key, leaf.value, leaf.origin, options))
            elif key not in reported:
                problems.append(wrong_value(key, leaf.value, leaf.origin, options[key]))
            reported.add(key)
    if problems:
        raise joined(problems, where)
    return config


def _holds_credentials(key: str, value: Any) -> bool:
    """Whether a value contains credentials, including those in command lines of MCP servers."""
    return holds_credentials(value) or (key == "agent.mcp_servers" and command_holds_credentials(str(value)))


def _is_text(value: Any) -> bool:
    """Whether a value can be encoded; bytes that are not UTF-8 are lone surrogates in Python's strings."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


def _located(key: str, inside: tuple[int | str, ...], leaf: _Value, fields: Fields) -> tuple[str, _Value, Fields]:
    """Key and value of the setting an error refers to (in a list of sections: of an entry), and the valid keys."""
    part = entry_section(fields[key])
    if part is None or len(inside) < 2:
        return key, leaf, fields
    entry, name = inside[:2]
    return (
        f"{key}[{entry}].{name}",
        _Value(leaf.value[entry][name], leaf.origin),
        dotted_fields(part, f"{key}[{entry}]."),
    )


def _recipe_values(recipe: str, folder: Path, parents: tuple[Path, ...]) -> dict[str, _Value]:
    """Values of a recipe merged over those of its `defaults`; relative paths are resolved against `folder`."""
    path = _recipe_path(recipe, folder)
    if path in parents:
        chain = " → ".join(str(step) for step in (*parents[parents.index(path) :], path))
        raise InputError("recipes without circular `defaults`", chain, str(path), "remove one of them from `defaults`")
    try:
        content = _load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise _invalid_yaml(error, str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            "a readable recipe", str(error), str(path), f"correct the path, or use one of {', '.join(recipe_names())}"
        ) from None
    tree = {} if content is None else content
    bases = tree.pop("defaults", []) if isinstance(tree, dict) else None
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise InputError(
            expected="a mapping of settings, in which `defaults` (if present) is a list of recipes",
            seen=repr(content)[:200],
            where=str(path),
            fix="use this form:\n          defaults: [grpo]\n          trainer:\n            steps: 10",
        )
    values: dict[str, _Value] = {}
    for base in bases:
        values |= _recipe_values(base, path.parent, (*parents, path))
    return values | _leaves(tree, f"recipe {recipe}")


def _recipe_path(recipe: str, folder: Path) -> Path:
    if recipe.endswith(".yaml"):
        return (folder / Path(recipe).expanduser()).resolve()
    names = recipe_names()
    if recipe in names:
        return (RECIPES / f"{recipe}.yaml").resolve()
    nearest = near_names(recipe, names, 1)
    raise InputError(
        expected=f"a recipe ({', '.join(names)}) or a path that ends in .yaml",
        seen=repr(recipe),
        where="recipe",
        fix=f"the nearest name is {nearest[0]}" if nearest else "use one of these names, or the path of a recipe",
    )


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: 1e-3 is a number; on, yes, 1:30 and dates are text. Duplicate keys are errors."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {name!r}", node.value[i][0].start_mark
                )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Also quotes strings that only `_Loader` parses as numbers."""


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), [*_first, ""])


def _load(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # a SafeLoader, which creates plain values only


def _invalid_yaml(error: yaml.YAMLError, where: str) -> InputError:
    seen = str(error)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        seen = f"{error.problem}, line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return InputError(
        expected="valid YAML",
        seen=seen,
        where=where,
        fix="correct it there; strings with special characters need quotes",
    )
