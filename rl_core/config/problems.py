"""The words for what can be wrong with settings: what was expected, what was seen, where, what to type next."""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rl_core.credentials import HOW
from rl_core.errors import InputError

Fields = Mapping[str, FieldInfo]
RENAMED = {
    "engine": "fsdp",
    "reward.further": "reward.extra_functions",
    "gate.length_ratio": "gate.max_length_ratio",
    "gate.format_drop": "gate.max_format_drop",
    "gate.refusal_rise": "gate.max_refusal_rise",
    "gate.source_drop": "gate.max_source_drop",
}
"""Former names of settings and sections: saved configs of older runs have them, and users may type them."""

_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def missing_equals(override: str, fields: Fields) -> InputError:
    """For an override that is no `a.b=value`."""
    return InputError(
        "an override KEY=VALUE", repr(override), "override", f"write for example {nearest(override, fields)}=VALUE"
    )


def current_name(key: str) -> str:
    """The present name of a setting that may have a former one."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            return new + key[len(old) :]
    return key


def unknown_key(key: str, value: Any, origin: str, fields: Fields) -> InputError:
    """For a key that the schema does not have, or a section where a value was given."""
    inside = [name for name in fields if name.startswith(f"{key}.")]
    if inside:
        return InputError(
            f"keys under the section {key}", f"{key} = {show(value)}", origin, f"set one such as {inside[0]}"
        )
    if (renamed := current_name(key)) != key:
        return InputError("a known key", key, origin, f"it is now called {renamed}")
    return InputError("a known key", key, origin, f"the nearest known key is {nearest(key, fields)}")


def wrong_value(key: str, value: Any, origin: str, field: FieldInfo) -> InputError:
    """For a value of the wrong type or out of range."""
    quote = isinstance(value, int | float) and str in (field.annotation, *get_args(field.annotation))
    fix = f"""quote it: {key}='"{value}"'""" if quote else f"give {key} such a value"
    return InputError(expectation(field), f"{key} = {show(value)}", f"{key} ({origin})", fix)


def credentials(key: str, origin: str) -> InputError:
    """For a value that holds credentials, which is not shown."""
    return InputError("settings without credentials, as they are kept and shown", f"{key} with some", origin, HOW)


def combination(message: str, origins: Mapping[str, str], fields: Fields) -> InputError:
    """For values that are fine alone and do not fit together; `message` names the keys."""
    keys = [key for key in dict.fromkeys(re.findall(r"\w+(?:\.\w+)+", message)) if key in fields]
    where = ", ".join(f"{key} ({origins.get(key, 'default')})" for key in keys)
    return InputError("settings that fit together", message, where, "change one of " + ", ".join(keys))


def joined(problems: Sequence[InputError], where: str) -> InputError:
    """One error for one or more problems."""
    if len(problems) == 1:
        return problems[0]
    lines = [f"\n  {i}. {p.where}: {p.seen}; expected {p.expected}; {p.fix}" for i, p in enumerate(problems, 1)]
    return InputError(
        "settings that are known, in range and fit together",
        f"{len(problems)} problems{''.join(lines)}",
        where,
        "correct each of them",
    )


def nearest(key: str, fields: Fields) -> str:
    """The known key that is most like `key`; where only the last part tells, as in `lr`, all keys that end like it."""
    close = difflib.get_close_matches(key, fields, n=1, cutoff=0.75)
    if close:
        return close[0]
    ends = sorted({name.rpartition(".")[2] for name in fields})
    end = difflib.get_close_matches(key.rpartition(".")[2], ends, n=1, cutoff=0)[0]
    same_end = [name for name in fields if name.rpartition(".")[2] == end]
    return " or ".join(difflib.get_close_matches(key, same_end, n=3, cutoff=0))


def expectation(field: FieldInfo) -> str:
    """Type and range of a field in words."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) is UnionType else (field.annotation,)
    words = [_kind(kind) for kind in kinds]
    ranges = []
    for rule in field.metadata:
        if isinstance(rule, Ge):
            ranges.append(f"of at least {rule.ge}")
        elif isinstance(rule, Gt):
            ranges.append(f"above {rule.gt}")
        elif isinstance(rule, Le):
            ranges.append(f"at most {rule.le}")
        elif isinstance(rule, Lt):
            ranges.append(f"below {rule.lt}")
    words[0] = " ".join([words[0], " and ".join(ranges)]).rstrip()
    return " or ".join(words)


def show(value: Any) -> str:
    """A value as one would type it; text is in quotes."""
    return json.dumps(value, ensure_ascii=False, default=str)


def entry_section(field: FieldInfo) -> type[BaseModel] | None:
    """The section that each entry of a list is, where the field is such a list."""
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
            return "a list out of " + ", ".join(get_args(first))
        return "a list of texts" if last is ... else f"a list of {len(get_args(kind))} numbers"
    return _TYPES.get(kind, str(kind))
