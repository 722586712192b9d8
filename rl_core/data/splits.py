"""Data sets stored as a folder with one or more files per split."""

import fnmatch
from collections.abc import Iterator

from rl_core.config.data import SourceConfig
from rl_core.data.files import read_records
from rl_core.data.rows import Found
from rl_core.errors import InputError
from rl_core.storage.store import Store


def one_folder(config: SourceConfig) -> str | None:
    """`data.path` without a trailing slash; raises InputError if it lists several paths."""
    if isinstance(config.path, tuple) and len(config.path) != 1:
        seen, where = f"data.path={list(config.path)}", f"data.source={config.source}"
        raise InputError("a single folder", seen, where, "set data.path to the folder with the files of both splits")
    path = config.path[0] if isinstance(config.path, tuple) else config.path
    return path and path.rstrip("/")


def read_split(path: str, name: str) -> Iterator[tuple[Found, str]]:
    """Records of the split in the folder or URL, each with its location, as returned by `read_records`.

    Raises InputError if there is no file NAME.jsonl, NAME.parquet or NAME-*.parquet, or one cannot be read.
    """
    return read_records(tuple(f"{path}/{file}" for file in _files(path, name)), None)


def _files(path: str, name: str) -> list[str]:
    there = Store(path).listdir()
    for pattern in (f"{name}.jsonl", f"{name}.parquet", f"{name}-*.parquet"):
        if found := fnmatch.filter(there, pattern):
            return found
    raise InputError(
        f"{name}.jsonl, {name}.parquet or {name}-*.parquet",
        f"files {', '.join(there[:10])}" if there else "no such folder, or an empty one",
        path,
        "set data.path to the folder or URL with the files of the data set",
    )
