"""Whether a run would be made of other data than an earlier one, without making its rows."""

import hashlib
import json

from rl_core.config.data import DataConfig, SourceConfig
from rl_core.data.files import file_identity


def data_identity(config: DataConfig, seed: int) -> str:
    """Hash of what the rows would be made of: the settings of the data and the content of its files.

    Names and times of files do not count. Rows that are made on the fly follow from settings and seed. Raises
    InputError and TransientError as `file_identity` does.
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
    # Size, time and hash where the file is local; the time is no content.
    return sorted(":".join(mark[::2] if len(mark) == 3 else mark) for mark in marks)
