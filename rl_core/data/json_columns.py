"""Restores nested values of records that were changed by storage in columnar files."""

import json
from typing import Any


def without_none(value: Any) -> Any:
    """The value without dict entries that are None, at any depth: a struct column gives every row all keys."""
    if isinstance(value, dict):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}
    return [without_none(inner) for inner in value] if isinstance(value, list) else value


def json_value(value: Any) -> Any:
    """The value with bytes decoded from UTF-8, and dates and other values as strings, at any depth.

    Raises UnicodeDecodeError for bytes that are not UTF-8.
    """
    if isinstance(value, dict):
        return {str(json_value(key)): json_value(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [json_value(inner) for inner in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return value.decode() if isinstance(value, bytes) else str(value)


def parsed(value: Any) -> Any:
    """The JSON object or list in a string; all other values, including other strings, unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def plain(value: Any) -> Any:
    """The value as originally written: JSON in a string, with its nulls; other values without None entries."""
    return parsed(value) if isinstance(value, str) else without_none(value)
