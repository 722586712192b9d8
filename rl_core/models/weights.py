"""Loads weights from safetensors files directly into the shards of a model, one tensor slice at a time."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_core.errors import InputError
from rl_core.models.conversion import Conversion, persistent_buffers
from rl_core.models.folder import INDEX
from rl_core.models.lora import base_name, first_values, is_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WEIGHTS = ("F64", "F32", "F16", "BF16")
"""Types of unscaled weights; values of smaller ones are wrong without their scales."""


class WeightFiles:
    """Tensors of a Hugging Face folder by name, from one or several files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / INDEX
        if index.is_file():
            self.file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            self.file_of = {name: file.name for file in sorted(folder.glob("*.safetensors")) for name in _names(file)}

    def read(self, name: str, rows: slice) -> Tensor:
        """Reads rows of a tensor (dimension 0); a scalar is read whole."""
        with safe_open(self.folder / self.file_of[name], framework="pt") as file:
            part = file.get_slice(name)
            values: Tensor = part[rows] if part.get_shape() else file.get_tensor(name)
            return values

    def kind(self, name: str) -> tuple[str, list[int]]:
        """Data type (as in the file) and shape of a tensor."""
        with safe_open(self.folder / self.file_of[name], framework="pt") as file:
            part = file.get_slice(name)
            return part.get_dtype(), list(part.get_shape())


def check_weights(model: "PreTrainedModel", folder: Path) -> Conversion:
    """The conversion of the folder's tensors to the model's parameters but adapters; reads no values.

    Raises InputError naming missing weights, or the file and tensor of another shape than the parameter's (of an
    embedding with more rows than `vocab_size`, some would be lost) or with quantised values.
    """
    files = WeightFiles(folder)
    conversion = Conversion(model, files.file_of)
    parameters = {base_name(name): each for name, each in model.named_parameters() if not is_adapter(name)}
    missing = [name for name in parameters if name not in conversion.sources]
    if missing:
        raise InputError(
            f"weights of all {len(parameters)} parameters of {type(model).__name__}",
            f"no weights for {len(missing)} of them, such as {', '.join(missing[:3])}",
            str(folder),
            "use a checkpoint whose tensor names match the architecture's parameter names",
        )
    for name, parameter in parameters.items():
        source = conversion.sources[name]
        for stored in chain.from_iterable(source.names.values()):
            dtype, shape = files.kind(stored)
            wanted = shape if source.converter else list(parameter.shape)  # a converter makes another shape
            if shape != wanted or dtype not in _WEIGHTS:
                raise InputError(
                    f"weights {' or '.join(_WEIGHTS)} of the shapes in config.json, here {wanted}",
                    f"{dtype} of shape {shape}",
                    f"{folder / files.file_of[stored]}, tensor {stored}",
                    "use the config.json of these weights (the rows of an embedding are its `vocab_size`), not "
                    "quantised",
                )
    return conversion


def load_weights(
    module: nn.Module, model: "PreTrainedModel", folder: Path, device: torch.device, seed: int = 0
) -> None:
    """Allocates a meta-device module, sharded or not, on `device`, and loads the folder's weights into its model.

    Each rank reads only its own rows. Adapters are initialised from `seed`, independent of the number of ranks. Other
    parameters of the module, such as a value head, start at zero. Raises InputError as `check_weights`.
    """
    files, conversion = WeightFiles(folder), check_weights(model, folder)
    setattr(model, "_weight_conversions", conversion.used)  # noqa: B010  # `save_pretrained` reverts them
    module.to_empty(device=device)
    model.tie_weights()  # `to_empty` allocates a separate tensor for each name of a tied weight
    stored = {name: buffer for name, buffer in persistent_buffers(model) if name in conversion.sources}
    _compute_buffers(model, model, {id(buffer) for buffer in stored.values()})
    for name, buffer in stored.items():
        buffer.copy_(conversion.read(name, slice(None), files.read))
    names = {parameter: base_name(name) for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if is_adapter(name):
            _fill(parameter, first_values(name, parameter.shape, generator).__getitem__)
        elif parameter in names:
            _fill(parameter, partial(conversion.read, names[parameter], read=files.read))
        else:
            nn.init.zeros_(parameter)


def _compute_buffers(part: nn.Module, owner: "PreTrainedModel", stored: set[int]) -> None:
    """Computes buffers that are not in the files, such as rotary frequencies, by the rules of the innermost model."""
    from transformers import PreTrainedModel

    owner = part if isinstance(part, PreTrainedModel) else owner
    if any(id(buffer) not in stored for buffer in part.buffers(recurse=False)):
        owner._init_weights(part)
    for child in part.children():
        _compute_buffers(child, owner, stored)


@torch.no_grad()
def _fill(parameter: nn.Parameter, read: Callable[[slice], Tensor]) -> None:
    """Copies the rows from `read` into the parameter, or into this rank's shard of it."""
    target, start = parameter.data, 0
    if isinstance(target, DTensor):
        _, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        target, start = target.to_local(), offset[0] if offset else 0
    if target.numel():
        target.copy_(read(slice(start, start + len(target)) if target.ndim else slice(None)))


def _names(file: Path) -> Iterator[str]:
    with safe_open(file, framework="pt") as opened:
        yield from opened.keys()
