"""Low-rank adapters (LoRA) with PEFT: injection, initialisation, disabling, and saving in PEFT's format."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rl_core.config.schema import LoraConfig
from rl_core.errors import InputError

if TYPE_CHECKING:
    import peft
    from peft.tuners.lora import Linear as AdapterLinear
    from transformers import PreTrainedModel

# PEFT takes seconds to import, and only runs with adapters need it.

ALL_LINEAR = "all-linear"
_ADAPTER = "default"  # PEFT's name for a model's only adapter


def add_adapters(model: "PreTrainedModel", config: LoraConfig) -> "PreTrainedModel":
    """Adds adapters to the model, which may be on the meta device; only adapters remain trainable.

    Raises InputError if a target is not a linear layer of the model, or is its head.
    """
    import peft

    targets = ALL_LINEAR if config.target_modules == (ALL_LINEAR,) else list(config.target_modules)
    if targets != ALL_LINEAR:
        _check_targets(model, config.target_modules)
    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=cast(int, config.alpha), target_modules=targets, task_type=peft.TaskType.CAUSAL_LM
    )
    with torch.device("meta"):
        peft.inject_adapter_in_model(settings, model)
    return model


def _check_targets(model: "PreTrainedModel", targets: tuple[str, ...]) -> None:
    head = model.get_output_embeddings()
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and part is not head]
    wrong = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in linear)]
    if wrong or not targets:
        names = ",".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise InputError(
            f"names of linear layers of {type(model).__name__} other than its head",
            f"{', '.join(wrong) or 'none'}",
            f"model.lora.target_modules=[{','.join(targets)}]",
            f"choose from model.lora.target_modules=[{names}] or use [{ALL_LINEAR}]",
        )


def is_adapter(name: str) -> bool:
    """Whether a parameter with this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """Name of the parameter in the model without adapters."""
    return name.replace(".base_layer.", ".")


def peft_name(name: str) -> str:
    """Name of an adapter parameter in PEFT's files."""
    return f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}"


def first_values(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Initial values of a whole adapter parameter: B is zero, so training starts at the base model."""
    if ".lora_B." in name:
        return torch.zeros(shape)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def factors(model: nn.Module) -> dict[str, tuple[Tensor, Tensor, float]]:
    """A [rank, in], B [out, rank] and scale of each adapter, by the name of the parameter it is added to."""
    found = {}
    for name, part in _adapted_layers(model).items():
        a, b = cast(nn.Linear, part.lora_A[_ADAPTER]).weight, cast(nn.Linear, part.lora_B[_ADAPTER]).weight
        found[f"{name}.base_layer.weight"] = (a, b, part.scaling[_ADAPTER])
    return found


def _adapted_layers(model: nn.Module) -> "dict[str, AdapterLinear]":
    if not any(is_adapter(name) for name, _ in model.named_parameters()):
        return {}
    from peft.tuners.lora import Linear as AdapterLinear

    return {name: part for name, part in model.named_modules() if isinstance(part, AdapterLinear)}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Context in which the model computes without adapters."""
    layers = list(_adapted_layers(model).values())
    # PEFT's own switch also clears requires_grad, which FSDP2 reads only once, when it first gathers the weights.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def load_adapters(model: "PreTrainedModel", folder: Path) -> dict[str, Tensor]:
    """Adapter weights under their PEFT names from a folder in PEFT's layout.

    A model without adapters gets those that the folder's config describes.
    """
    import peft

    if not any(is_adapter(name) for name, _ in model.named_parameters()):
        peft.inject_adapter_in_model(peft.LoraConfig.from_pretrained(str(folder)), model)
    return load_file(folder / "adapter_model.safetensors")


def save_adapters(model: "PreTrainedModel", weights: dict[str, Tensor], base: Path, folder: Path) -> None:
    """Writes whole adapter weights under their PEFT names, and their config, to a new folder.

    `base` is the folder of the base model.
    """
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = cast("dict[str, peft.LoraConfig]", model.peft_config)[_ADAPTER]
    config = settings.to_dict() | {"inference_mode": True, "base_model_name_or_path": str(base)}
    text = json.dumps(config, default=sorted, indent=1, sort_keys=True)  # sorts sets, whose order is arbitrary
    (folder / "adapter_config.json").write_text(text)
