"""Data sets that are a folder with a file, or several, of each split."""

import fnmatch

from rl_core.data.rows import Row, read_rows
from rl_core.errors import InputError
from rl_core.storage import Store


def read_split(path: str, name: str) -> list[tuple[Row, str]]:
    """Records of the split in the folder or URL, each with where it stands.

    Raises InputError when there is no file NAME.jsonl, NAME.parquet or NAME-*.parquet, or one cannot be read.
    """
    files = [f"{path}/{file}" for file in _files(path, name)]
    return [(record, f"{file}, row {i}") for file in files for i, record in enumerate(read_rows(file), start=1)]


def _files(path: str, name: str) -> list[str]:
    there = Store(path).listdir()
    for pattern in (f"{name}.jsonl", f"{name}.parquet", f"{name}-*.parquet"):
        if found := fnmatch.filter(there, pattern):
            return found
    raise InputError(
        f"{name}.jsonl, {name}.parquet or {name}-*.parquet",
        f"files {', '.join(there[:10])}" if there else "no such folder, or an empty one",
        path,
        "give the folder or URL that holds the data set's files as data.path",
    )
