"""Reading of checkpoints by torch.distributed.checkpoint without running what is in them.

torch keeps the table of a checkpoint's tensors as a pickle and reads it as any pickle, which may name any function to
call. Here it may name what a table of tensors is made of; objects, which torch would unpickle as well, are none.
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
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


class TensorReader(FileSystemReader):
    """Reads the tensors of a checkpoint in a folder of this machine, and runs nothing of it."""

    def __init__(self, path: Path) -> None:
        """Raises InputError for a checkpoint that holds, or whose table names, anything but tensors."""
        super().__init__(path)
        self._table = _read_table(path / METADATA)  # torch would look for another table when its own call failed

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The table of the checkpoint's tensors."""
        self._table.storage_meta = StorageMeta(load_id=self.load_id)
        return self._table


def _read_table(file: Path) -> Metadata:
    try:
        with file.open("rb") as data:
            table = _TableUnpickler(data).load()
        _check(table)
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, ImportError, IndexError) as error:
        raise InputError(
            "a checkpoint as this project writes it: tensors and a table of them",
            f"{type(error).__name__}: {error}",
            str(file),
            "find out who changed it; remove the folder of its step to continue from the one before",
        ) from error
    assert isinstance(table, Metadata)
    return table


def _check(table: Any) -> None:
    """Raises ValueError unless the table is one of files beside it."""
    if not isinstance(table, Metadata):
        raise ValueError(f"a {type(table).__name__} instead of a table")
    for entry in (table.storage_data or {}).values():
        if Path(entry.relative_path).name != entry.relative_path:
            raise ValueError(f"{entry.relative_path!r} is no file of this folder")
        if entry.transform_descriptors:
            raise ValueError(f"{entry.relative_path} is transformed")
