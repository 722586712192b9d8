"""Loads weights from safetensors files directly into the shards of a model, one tensor slice at a time."""

import json
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_core.errors import InputError
from rl_core.models.conversion import Conversion, Source, persistent_buffers, stacks_experts
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

    @cached_property
    def kinds(self) -> dict[str, tuple[str, list[int]]]:
        """Data type (as in the file) and shape of each tensor in the files."""
        found = {}
        for each in sorted(set(self.file_of.values())):
            with safe_open(self.folder / each, framework="pt") as file:
                for name in (name for name, place in self.file_of.items() if place == each):
                    part = file.get_slice(name)
                    found[name] = part.get_dtype(), list(part.get_shape())
        return found


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
        _check_experts(name, parameter, source, files)
        for stored in chain.from_iterable(source.names.values()):
            dtype, shape = files.kinds[stored]
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


def _check_experts(name: str, parameter: Tensor, source: Source, files: WeightFiles) -> None:
    """Raises InputError unless every expert of a stack has tensors of one shape for each pattern."""
    if source.converter is None or not stacks_experts(source.converter):
        return
    for pattern in source.converter.source_patterns:
        stored = source.names.get(pattern, [])
        shapes = {tuple(files.kinds[each][1]) for each in stored}
        if len(stored) != len(parameter) or len(shapes) != 1:
            raise InputError(
                f"tensors {pattern} of {len(parameter)} experts, of one shape",
                f"{len(stored)} tensors" + (f" of the shapes {sorted(shapes)}" if len(shapes) > 1 else ""),
                f"{files.folder}, parameter {name}",
                "use the config.json of these weights, and all of their files",
            )


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
        _copy(name, buffer, conversion.read(name, slice(None), files.read))
    names = {parameter: base_name(name) for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if is_adapter(name):
            _fill(name, parameter, first_values(name, parameter.shape, generator).__getitem__)
        elif parameter in names:
            _fill(name, parameter, partial(conversion.read, names[parameter], read=files.read))
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
def _fill(name: str, parameter: nn.Parameter, read: Callable[[slice], Tensor]) -> None:
    """Copies the rows from `read` into the parameter, or into this rank's shard of it."""
    target, start = parameter.data, 0
    if isinstance(target, DTensor):
        _, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        target, start = target.to_local(), offset[0] if offset else 0
    if target.numel():
        _copy(name, target, read(slice(start, start + len(target)) if target.ndim else slice(None)))


def _copy(name: str, target: Tensor, values: Tensor) -> None:
    if values.shape != target.shape:  # `copy_` would repeat the values of a smaller shape
        raise InputError(
            f"values of shape {list(target.shape)} for {name}",
            f"shape {list(values.shape)}",
            "the model's weights",
            "use the config.json of these weights",
        )
    target.copy_(values)


def _names(file: Path) -> Iterator[str]:
    with safe_open(file, framework="pt") as opened:
        yield from opened.keys()
