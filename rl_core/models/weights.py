"""Loads weights from safetensors files directly into the shards of a model, one tensor slice at a time."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_core.errors import InputError
from rl_core.models.lora import base_name, first_values, is_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WeightFiles:
    """Tensors of a Hugging Face folder by name, from one or several files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
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


def load_weights(
    module: nn.Module, model: "PreTrainedModel", folder: Path, device: torch.device, seed: int = 0
) -> None:
    """Allocates a meta-device module, sharded or not, on `device`, and loads the folder's weights into its model.

    Each rank reads only its own rows. Adapters are initialised from `seed`, independent of the number of ranks. Other
    parameters of the module, such as a value head, start at zero. Raises InputError naming missing weights.
    """
    files = WeightFiles(folder)
    found = {
        name: _stored_name(base_name(name), model, files)
        for name, _ in model.named_parameters()
        if not is_adapter(name)
    }
    missing = [name for name, stored in found.items() if stored is None]
    if missing:
        raise InputError(
            f"weights of all {len(found)} parameters of {type(model).__name__}",
            f"no weights for {len(missing)} of them, such as {', '.join(missing[:3])}",
            str(folder),
            "use a checkpoint whose tensor names match the architecture's parameter names",
        )
    module.to_empty(device=device)
    model.tie_weights()  # `to_empty` allocates a separate tensor for each name of a tied weight
    for part in model.modules():
        if any(True for _ in part.buffers(recurse=False)):
            model._init_weights(part)  # computed buffers, such as rotary frequencies, are not in the files
    names = {parameter: found.get(name) for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        stored = names.get(parameter)
        if stored is not None:
            _fill(parameter, partial(files.read, stored))
        elif is_adapter(name):
            _fill(parameter, first_values(name, parameter.shape, generator).__getitem__)
        else:
            nn.init.zeros_(parameter)


@torch.no_grad()
def _fill(parameter: nn.Parameter, read: Callable[[slice], Tensor]) -> None:
    """Copies the rows from `read` into the parameter, or into this rank's shard of it."""
    target, start = parameter.data, 0
    if isinstance(target, DTensor):
        _, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        target, start = target.to_local(), offset[0] if offset else 0
    if target.numel():
        target.copy_(read(slice(start, start + len(target)) if target.ndim else slice(None)))


def _stored_name(name: str, model: "PreTrainedModel", files: WeightFiles) -> str | None:
    """Name of a parameter in the folder, with or without the base model's prefix."""
    prefix = f"{model.base_model_prefix}."
    return next((each for each in (name, prefix + name, name.removeprefix(prefix)) if each in files.file_of), None)


def _names(file: Path) -> Iterator[str]:
    with safe_open(file, framework="pt") as opened:
        yield from opened.keys()
