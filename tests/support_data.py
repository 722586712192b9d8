"""Rows that the tests of data are about."""

from typing import Any


def row(text: str, **changes: Any) -> dict[str, Any]:
    """A row whose prompt and answer are the text."""
    return {
        "data_source": "exact",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": text},
    } | changes
