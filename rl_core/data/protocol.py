"""DataProto: the batch exchanged between the roles of a run."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

Metrics = dict[str, float]
"""Metrics by name."""
Indices = slice | Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor


@dataclass
class DataProto:
    """Named columns with one row per sample: tensors and numpy arrays.

    `batch` holds tensors [rows, ...], `non_tensor_batch` arrays [rows, ...]; a name occurs in only one of them.
    Raises ValueError if columns differ in length or share a name.
    """

    batch: dict[str, torch.Tensor] = field(default_factory=dict)
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shared = self.batch.keys() & self.non_tensor_batch.keys()
        if shared:
            raise ValueError(f"columns {sorted(shared)} are in both batch and non_tensor_batch")
        scalars = [name for name, column in self._columns().items() if column.ndim == 0]
        if scalars:
            raise ValueError(f"columns {sorted(scalars)} are scalars; columns need one entry per row")
        lengths = {name: len(column) for name, column in self._columns().items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns differ in length: {lengths}")

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor],
        non_tensors: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
    ) -> "DataProto":
        """Build a batch; lists become object arrays with one entry per row. Raises ValueError on unequal lengths."""
        arrays = {
            name: values if isinstance(values, np.ndarray) else _object_array(values)
            for name, values in (non_tensors or {}).items()
        }
        return cls(dict(tensors), arrays)

    @property
    def columns(self) -> set[str]:
        """Names of all columns."""
        return set(self._columns())

    def __len__(self) -> int:
        return next((len(column) for column in self._columns().values()), 0)

    def __getitem__(self, rows: Indices) -> "DataProto":
        """Take rows by slice, indices or boolean mask; a slice with a positive step shares memory."""
        if isinstance(rows, slice) and (rows.step is None or rows.step > 0):
            return self._map(lambda tensor: tensor[rows], lambda array: array[rows])
        if isinstance(rows, slice):
            rows = range(*rows.indices(len(self)))
        if not isinstance(rows, torch.Tensor):
            # An empty list would become a float tensor, which cannot index.
            rows = torch.as_tensor(np.asarray(rows)) if len(rows) else torch.empty(0, dtype=torch.long)
        rows = rows.cpu()
        if rows.dtype == torch.bool and len(rows) != len(self):
            raise IndexError(f"a mask of {len(rows)} entries cannot select from {len(self)} rows")
        return self._map(lambda tensor: tensor[rows.to(tensor.device)], lambda array: array[rows.numpy()])

    def reorder(self, indices: Sequence[int] | torch.Tensor) -> "DataProto":
        """Rows in the order of `indices`, which must name every row once; raises ValueError otherwise."""
        order = torch.as_tensor(indices, dtype=torch.long)
        if not torch.equal(order.sort().values.cpu(), torch.arange(len(self))):
            raise ValueError(f"reorder needs a permutation of {len(self)} rows, got {len(order)} indices")
        return self[order]

    def union(self, other: "DataProto") -> "DataProto":
        """All columns of both; raises ValueError naming a column whose two values differ."""
        if self._columns() and other._columns() and len(self) != len(other):
            raise ValueError(f"union of {len(self)} and {len(other)} rows")
        return DataProto(
            _merge(self.batch, other.batch),
            _merge(self.non_tensor_batch, other.non_tensor_batch),
        )

    def select(self, keys: Iterable[str]) -> "DataProto":
        """The named columns only; raises ValueError naming an unknown column."""
        selected = self._known(keys)
        return DataProto(
            {name: tensor for name, tensor in self.batch.items() if name in selected},
            {name: array for name, array in self.non_tensor_batch.items() if name in selected},
        )

    def pop(self, keys: Iterable[str]) -> "DataProto":
        """Remove the named columns and return them; raises ValueError naming an unknown column."""
        popped = self.select(keys)
        for name in popped._columns():
            self.batch.pop(name, None)
            self.non_tensor_batch.pop(name, None)
        return popped

    def repeat(self, n: int) -> "DataProto":
        """Every row n times in a row: a a b b."""
        return self[torch.arange(len(self)).repeat_interleave(n)]

    def chunk(self, k: int) -> list["DataProto"]:
        """k equal parts in order; raises ValueError if k does not divide the number of rows."""
        if k < 1 or len(self) % k:
            raise ValueError(f"{len(self)} rows do not divide into {k} equal chunks; pad_to_divisor({k}) first")
        size = len(self) // k
        return [self[i * size : (i + 1) * size] for i in range(k)]

    @staticmethod
    def concat(parts: Sequence["DataProto"]) -> "DataProto":
        """Rows of all parts in order; tensors [rows, width] are padded with zeros to the widest part.

        Raises ValueError if columns differ.
        """
        if not parts:
            raise ValueError("concat of no parts")
        first = parts[0]
        for part in parts:
            if part.batch.keys() != first.batch.keys() or part.non_tensor_batch.keys() != first.non_tensor_batch.keys():
                raise ValueError(f"columns differ: {sorted(first._columns())} and {sorted(part._columns())}")
        return DataProto(
            {name: _stacked([part.batch[name] for part in parts]) for name in first.batch},
            {name: np.concatenate([part.non_tensor_batch[name] for part in parts]) for name in first.non_tensor_batch},
        )

    def pad_to_divisor(self, k: int) -> tuple["DataProto", int]:
        """Repeat rows from the start until k divides their number; returns the batch and the rows added."""
        rows, added = len(self), -len(self) % k
        return (self if added == 0 else self[torch.arange(rows + added) % rows]), added

    def unpad(self, n: int) -> "DataProto":
        """Without the last n rows, which `pad_to_divisor` added."""
        if not 0 <= n <= len(self):
            raise ValueError(f"cannot remove {n} of {len(self)} rows")
        return self[: len(self) - n]

    def to_bytes(self) -> bytes:
        """The columns as a safetensors file; non-tensor columns are stored as JSON and must hold JSON values."""
        others = {name: array.tolist() for name, array in self.non_tensor_batch.items()}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.batch.items()}
        return save(tensors, {"columns": json.dumps(others)})

    @classmethod
    def from_bytes(cls, data: bytes) -> "DataProto":
        """Inverse of `to_bytes`."""
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return cls.from_dict(load(data), json.loads(header["__metadata__"]["columns"]))

    def __getstate__(self) -> dict[str, Any]:
        # A view would be pickled with its whole storage, and a GPU tensor cannot be unpickled without a GPU.
        return {
            "batch": {name: _compact(tensor) for name, tensor in self.batch.items()},
            "non_tensor_batch": self.non_tensor_batch,
        }

    def _columns(self) -> dict[str, torch.Tensor | np.ndarray]:
        return {**self.batch, **self.non_tensor_batch}

    def _known(self, keys: Iterable[str]) -> set[str]:
        requested = {keys} if isinstance(keys, str) else set(keys)
        unknown = requested - self._columns().keys()
        if unknown:
            raise ValueError(f"no columns {sorted(unknown)}; columns: {sorted(self._columns())}")
        return requested

    def _map(self, on_tensor: Any, on_array: Any) -> "DataProto":
        return DataProto(
            {name: on_tensor(tensor) for name, tensor in self.batch.items()},
            {name: on_array(array) for name, array in self.non_tensor_batch.items()},
        )


def _object_array(values: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):  # np.array() would turn rows of equal length into a second dimension
        array[i] = value
    return array


def _stacked(tensors: list[torch.Tensor]) -> torch.Tensor:
    # Each part is padded to its own longest prompt, so widths differ between ranks and rollouts.
    if tensors[0].ndim == 2:
        width = max(tensor.shape[1] for tensor in tensors)
        tensors = [torch.nn.functional.pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors]
    return torch.cat(tensors)


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _merge(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    for key in left.keys() & right.keys():
        if not _identical(left[key], right[key]):
            raise ValueError(f"'{key}' has different values in the parts to be joined")
    return {**left, **right}


def _identical(a: Any, b: Any) -> bool:
    """Same type, shape and values; NaN is identical to NaN."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and all(map(_identical, a.ravel(), b.ravel()))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_identical(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_identical, a, b))
    return bool(a == b) or bool(a != a and b != b)
