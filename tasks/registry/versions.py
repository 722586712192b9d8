"""Records of the registry: one version, and one move of the alias `champion`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

TAG_PREFIX = "rollforward."
CHECKPOINT = TAG_PREFIX + "checkpoint"
"""Tag with the hash that identifies a version's files."""


@dataclass(frozen=True)
class VersionInfo:
    """A registered version with the values of its tags; a field whose tag is missing is None."""

    version: str
    aliases: tuple[str, ...]
    step: int | None
    run: str | None
    score_before: float | None
    score_after: float | None
    created: datetime
    checkpoint: str | None
    tags: Mapping[str, str] = field(default_factory=dict)
    """All tags with the prefix `rollforward.`, without the prefix."""


@dataclass(frozen=True)
class Move:
    """A move of the alias `champion` from the version `before` to `version`."""

    at: str
    """Time in UTC, as `2026-01-31T12:00:00.000000Z`."""
    version: str
    before: str | None
    why: str
    by: str


def version_info(version: Any, aliases: Mapping[str, str]) -> VersionInfo:
    """Converts MLflow's version; `aliases` maps each alias of the model to a version."""
    number = str(version.version)

    def tag(key: str) -> str | None:
        value: str | None = version.tags.get(TAG_PREFIX + key)
        return value

    def score(key: str) -> float | None:
        text = tag(key)
        return None if text is None else float(text)

    step = tag("step")
    return VersionInfo(
        version=number,
        aliases=tuple(sorted(alias for alias, target in aliases.items() if target == number)),
        step=None if step is None else int(step),
        run=tag("run"),
        score_before=score("score_before"),
        score_after=score("score_after"),
        created=datetime.fromtimestamp(version.creation_timestamp / 1000, tz=UTC),
        checkpoint=tag("checkpoint"),
        tags={key.removeprefix(TAG_PREFIX): value for key, value in version.tags.items() if key.startswith(TAG_PREFIX)},
    )
