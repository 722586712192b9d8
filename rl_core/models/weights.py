"""Weights from safetensors files straight into the shards of a model, a slice of a tensor at a time."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from rl_core.errors import InputError
from rl_core.models.lora import base_name, first_values, is_adapter


class WeightFiles:
    """The tensors of a Hugging Face folder by name, whatever number of files they lie in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self.file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            self.file_of = {name: file.name for file in sorted(folder.glob("*.safetensors")) for name in _names(file)}

    def read(self, name: str, rows: slice) -> Tensor:
        """Some rows of a tensor (dimension 0); a scalar is read whole."""
        with safe_open(self.folder / self.file_of[name], framework="pt") as file:
            part = file.get_slice(name)
            values: Tensor = part[rows] if part.get_shape() else file.get_tensor(name)
            return values


def load_weights(module: nn.Module, model: PreTrainedModel, folder: Path, device: torch.device, seed: int = 0) -> None:
    """Gives a module that has shapes only, sharded or not, memory on the device and its model the folder's weights.

    No rank reads more than its own rows. Adapters are drawn with `seed`, the same for any number of ranks. What the
    module has beside the model, such as a value head, starts at zero. Raises InputError that names the weights that
    the folder lacks.
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
            f"none for {len(missing)}, such as {', '.join(missing[:3])}",
            str(folder),
            "give a checkpoint whose tensors have the names of the architecture's parameters",
        )
    module.to_empty(device=device)
    model.tie_weights()  # `to_empty` gave the two names of a tied weight a tensor each
    for part in model.modules():
        if any(True for _ in part.buffers(recurse=False)):
            model._init_weights(part)  # computed ones such as rotary frequencies are in no file
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
    """Copies what `read` gives, whole or this rank's rows of it, into the parameter."""
    target, start = parameter.data, 0
    if isinstance(target, DTensor):
        _, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        target, start = target.to_local(), offset[0] if offset else 0
    if target.numel():
        target.copy_(read(slice(start, start + len(target)) if target.ndim else slice(None)))


def _stored_name(name: str, model: PreTrainedModel, files: WeightFiles) -> str | None:
    """The folder's name for a parameter: a base model's weights lie under its prefix in the whole model's folder."""
    prefix = f"{model.base_model_prefix}."
    return next((each for each in (name, prefix + name, name.removeprefix(prefix)) if each in files.file_of), None)


def _names(file: Path) -> Iterator[str]:
    with safe_open(file, framework="pt") as opened:
        yield from opened.keys()
