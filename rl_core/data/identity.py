"""Identity of a run's data, computed without building its rows."""

import hashlib
import json

from rl_core.config.data import DataConfig, SourceConfig
from rl_core.data.files import file_identity


def data_identity(config: DataConfig, seed: int) -> str:
    """SHA-256 (hexadecimal) of everything that determines the rows: data settings, file contents and seed.

    Names and times of files are ignored. Generated rows are determined by settings and seed. Raises InputError and
    TransientError like `file_identity`.
    """
    known = {
        "settings": config.model_dump(mode="json", exclude={"path": True, "val_path": True, "mixture": True}),
        "sources": [_source(source) for source in config.sources],
        "seed": seed,
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def _source(source: SourceConfig) -> list[object]:
    settings = source.model_dump(mode="json", include=set(SourceConfig.model_fields) - {"path", "val_path"})
    return [settings, *(_contents(path) if path else [] for path in (source.path, source.val_path))]


def _contents(path: str | tuple[str, ...]) -> list[str]:
    marks = [mark.split(":") for mark in file_identity(path).values()]
    # Local files: size, time and hash; the time is dropped.
    return sorted(":".join(mark[::2] if len(mark) == 3 else mark) for mark in marks)
