"""Reads checkpoints of torch.distributed.checkpoint without executing code in them.

torch stores a checkpoint's table of tensors as a pickle and unpickles it without restrictions, so it could call any
function. Here only the types of a tensor table are allowed; pickled objects, which torch would also load, are rejected.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from rl_core.errors import InputError

METADATA = ".metadata"
_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath"},
}  # fmt: skip


class _TableUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it references {module}.{name}")
        return super().find_class(module, name)


class TensorReader(FileSystemReader):
    """Reads the tensors of a checkpoint in a local folder without executing anything in it."""

    def __init__(self, path: Path) -> None:
        """Raises InputError for a checkpoint that contains, or whose table references, anything but tensors."""
        super().__init__(path)
        self._table = _read_table(path / METADATA)  # read here: if torch's own read fails, it tries another table

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Table of the checkpoint's tensors."""
        self._table.storage_meta = StorageMeta(load_id=self.load_id)
        return self._table


def _read_table(file: Path) -> Metadata:
    try:
        with file.open("rb") as data:
            table = _TableUnpickler(data).load()
        _check(table)
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, ImportError, IndexError) as error:
        raise InputError(
            "a checkpoint written by Rollforward: tensors and a table of them",
            f"{type(error).__name__}: {error}",
            str(file),
            "find out who changed it; to resume from the previous checkpoint, remove the folder of this step",
        ) from error
    assert isinstance(table, Metadata)
    return table


def _check(table: Any) -> None:
    """Raises ValueError unless the table references only untransformed files in its own folder."""
    if not isinstance(table, Metadata):
        raise ValueError(f"a {type(table).__name__} instead of a table")
    for entry in (table.storage_data or {}).values():
        if Path(entry.relative_path).name != entry.relative_path:
            raise ValueError(f"{entry.relative_path!r} is not a file in this folder")
        if entry.transform_descriptors:
            raise ValueError(f"{entry.relative_path} is transformed")
