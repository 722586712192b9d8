"""Error messages for invalid settings: what was expected, what was seen, where, and how to fix it."""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rl_core.credentials import CREDENTIALS_FIX
from rl_core.errors import InputError, near_names

Fields = Mapping[str, FieldInfo]
RENAMED = {
    "engine": "fsdp",
    "reward.further": "reward.extra_functions",
    "gate.length_ratio": "gate.max_length_ratio",
    "gate.format_drop": "gate.max_format_drop",
    "gate.refusal_rise": "gate.max_refusal_rise",
    "gate.source_drop": "gate.max_source_drop",
}
"""Former names of settings and sections, as found in saved configs of older runs; users may still type them."""

_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", type(None): "null"}


def missing_equals(override: str, fields: Fields) -> InputError:
    """Error for an override that is not of the form `a.b=value`."""
    return InputError(
        expected="an override of the form KEY=VALUE",
        seen=repr(override),
        where="override",
        fix=f"for example, use {nearest(override, fields) or 'trainer.steps'}=VALUE",
    )


def current_name(key: str) -> str:
    """The current name of a setting, given its current or a former name."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            return new + key[len(old) :]
    return key


def unknown_key(key: str, value: Any, origin: str, fields: Fields) -> InputError:
    """Error for a key that is not in the schema, or for a section that was given a value."""
    inside = [name for name in fields if name.startswith(f"{key}.")]
    if inside:
        return InputError(
            expected=f"settings within the section {key}",
            seen=f"{key} = {show(value)}",
            where=origin,
            fix=f"set a key of the section, such as {inside[0]}",
        )
    near = nearest(key, fields)
    fix = f"the nearest known key is {near}" if near else "`rollforward config RECIPE` lists all keys"
    if (renamed := current_name(key)) != key:
        fix = f"it has been renamed to {renamed}"
    return InputError(expected="a known key", seen=key, where=origin, fix=fix)


def wrong_value(key: str, value: Any, origin: str, field: FieldInfo) -> InputError:
    """Error for a value of the wrong type or out of range."""
    quote = isinstance(value, int | float) and str in _kinds(field)
    fix = f"""quote it: {key}='"{value}"'""" if quote else f"set {key} to a valid value"
    return InputError(expectation(field), f"{key} = {show(value)}", f"{key} ({origin})", fix)


def credentials(key: str, origin: str) -> InputError:
    """Error for a value that contains credentials; the message does not show the value."""
    return InputError(
        expected="settings without credentials, because settings are stored and displayed",
        seen=f"{key} contains credentials",
        where=origin,
        fix=CREDENTIALS_FIX,
    )


def not_text(key: str, value: Any, origin: str) -> InputError:
    """Error for a value with bytes that are not UTF-8, as a file name on the command line can have."""
    seen = f"{key} = {show(value)}".encode("ascii", "backslashreplace").decode()
    return InputError("text in UTF-8", seen, f"{key} ({origin})", "rename the file, or use another path")


def combination(message: str, origins: Mapping[str, str], fields: Fields) -> InputError:
    """Error for values that are each valid but inconsistent with each other; `message` names the keys."""
    keys = [key for key in dict.fromkeys(re.findall(r"\w+(?:\.\w+)+", message)) if key in fields]
    where = ", ".join(f"{key} ({origins.get(key, 'default')})" for key in keys)
    return InputError("consistent settings", message, where, "change one of " + ", ".join(keys))


def joined(problems: Sequence[InputError], where: str) -> InputError:
    """A single error that lists one or more problems."""
    if len(problems) == 1:
        return problems[0]
    lines = [f"\n  {i}. {p.where}: {p.seen}; expected {p.expected}; {p.fix}" for i, p in enumerate(problems, 1)]
    return InputError(
        expected="known, valid and consistent settings",
        seen=f"{len(problems)} problems{''.join(lines)}",
        where=where,
        fix="correct each of them",
    )


def nearest(key: str, fields: Fields) -> str:
    """The known key most similar to `key`; if only its last part is similar, as in `lr`, up to 3 keys that end in it.

    Empty if no key is similar.
    """
    last = key.rpartition(".")[2]
    for name in near_names(key, fields):
        # Within a section, all names are similar by its name alone.
        if name.count(".") != key.count(".") or near_names(last, [name.rpartition(".")[2]]):
            return name
    end = near_names(last, sorted({name.rpartition(".")[2] for name in fields}), 1)
    same_end = [name for name in fields if name.rpartition(".")[2] in end]
    return " or ".join(difflib.get_close_matches(key, same_end, n=3, cutoff=0))


def expectation(field: FieldInfo) -> str:
    """Description of a field's type and range."""
    alternatives = [_kind(kind) for kind in _kinds(field)]
    alternatives[0] = f"{alternatives[0]} {_range(field.metadata)}".rstrip()
    return " or ".join(alternatives)


def _kinds(field: FieldInfo) -> tuple[Any, ...]:
    """The alternatives of a field's type."""
    return get_args(field.annotation) if get_origin(field.annotation) is UnionType else (field.annotation,)


def _range(rules: Sequence[Any]) -> str:
    """The bounds among a field's rules as text."""
    ranges = []
    for rule in rules:
        if isinstance(rule, FieldInfo):
            ranges.append(_range(rule.metadata))
        elif isinstance(rule, Ge):
            ranges.append(f"of at least {_plain(rule.ge)}")
        elif isinstance(rule, Gt):
            ranges.append(f"above {_plain(rule.gt)}")
        elif isinstance(rule, Le):
            ranges.append(f"at most {_plain(rule.le)}")
        elif isinstance(rule, Lt):
            ranges.append(f"below {_plain(rule.lt)}")
    return " and ".join(ranges)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def show(value: Any) -> str:
    """A value as a user would type it; text is quoted."""
    return json.dumps(value, ensure_ascii=False, default=str)


def entry_section(field: FieldInfo) -> type[BaseModel] | None:
    """The section class of a list's entries if the field is a list of sections, else None."""
    kind = next(iter(get_args(field.annotation)), None) if get_origin(field.annotation) is tuple else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _kind(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    if get_origin(kind) is tuple:
        first, *_, last = get_args(kind)
        if isinstance(first, type) and issubclass(first, BaseModel):
            return "a list of {" + ": …, ".join(first.model_fields) + ": …}"
        if get_origin(first) is Literal:
            return "a list with entries from " + ", ".join(get_args(first))
        item, *rules = get_args(first) if get_origin(first) is Annotated else (first,)
        count = "" if last is ... else f"{len(get_args(kind))} "
        return f"a list of {count}{_TYPES[item].removeprefix('a ')}s {_range(rules)}".rstrip()
    if get_origin(kind) is dict:
        return "a mapping of names to true, false, numbers or strings"
    return _TYPES.get(kind, str(kind))
