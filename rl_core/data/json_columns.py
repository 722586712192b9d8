"""Nested values of records as they were before files of columns held them."""

import json
from typing import Any


def without_none(value: Any) -> Any:
    """The value without entries of dicts, however deep, that are None: a column of structs gives every row all keys."""
    if isinstance(value, dict):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}
    return [without_none(inner) for inner in value] if isinstance(value, list) else value


def parsed(value: Any) -> Any:
    """The JSON object or list that a text holds; every other value, and a text that holds neither, as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def plain(value: Any) -> Any:
    """The value as its writer meant it: the JSON that a text holds, with its nulls, and other values without None."""
    return parsed(value) if isinstance(value, str) else without_none(value)
