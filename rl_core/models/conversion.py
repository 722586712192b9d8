"""Names and layouts of a checkpoint's tensors and of transformers' parameters, converted in both directions.

transformers packs, for example, the experts of a layer into one parameter, while checkpoints and rollout engines have a
tensor for each expert. The rules are transformers' own (`conversion_mapping`), as in `from_pretrained` and
`save_pretrained`.
"""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from rl_core.models.lora import base_name, is_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Read = Callable[[str, slice], Tensor]
"""Reads rows of a stored tensor."""


@dataclass
class Source:
    """Stored tensors of a parameter by the pattern of the converter that makes it; without one, a single tensor."""

    converter: WeightConverter | None
    names: dict[str, list[str]] = field(default_factory=dict)


class Conversion:
    """The conversions that a checkpoint with the given tensor names needs for a model."""

    def __init__(self, model: "PreTrainedModel", stored: Iterable[str]) -> None:
        self._model = model
        self.sources: dict[str, Source] = {}
        """Where each parameter and persistent buffer comes from; missing ones are absent."""
        transforms = get_model_conversion_mapping(model)
        self._find(list(stored), transforms)
        self.used: list[WeightTransform] = [each for each in transforms if each.was_used()]
        """transformers' conversions that matched a stored name, in its order."""

    def _find(self, stored: list[str], transforms: list[WeightTransform]) -> None:
        renamings, converters = _split(transforms)
        own: dict[str, object] = dict.fromkeys(state_names(self._model), True)
        prefix = self._model.base_model_prefix
        for name in sorted(stored, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, own)
            if target not in own:
                # The name is one of the model's already, and a rule for another model type matches it.
                target, pattern = rename_source_key(name, [], [], prefix, own)
            converter = next((each for each in converters if pattern in each.source_patterns), None)
            for each in _all_targets(target, converter):
                if each in own:
                    source = self.sources.setdefault(each, Source(converter))
                    source.names.setdefault(pattern or name, []).append(name)

    def read(self, name: str, rows: slice, read: Read) -> Tensor:
        """Rows of a parameter; reads only the experts in these rows if the parameter is a stack of experts."""
        source = self.sources[name]
        if source.converter is None:
            return read(next(iter(source.names.values()))[0], rows)
        by_expert = stacks_experts(source.converter)
        converter = deepcopy(source.converter)
        for pattern, names in source.names.items():
            chosen = names[rows] if by_expert else names
            parts: list[Any] = [partial(read, each, slice(None)) for each in chosen]  # read when they are converted
            converter.collected_tensors[pattern] = parts
        values = converter.convert(name, model=self._model, config=self._model.config)
        value = values[name]
        whole: Tensor = value[0] if isinstance(value, list) else value
        return whole if by_expert or not whole.ndim else whole[rows]

    def to_stored(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The model's named parameters as tensors of the checkpoint, each as soon as all its parts have arrived."""
        renamings, converters = _split([each.reverse_transform() for each in self.used[::-1]])
        waiting: dict[str, WeightConverter] = {}
        for name, tensor in parameters:
            stored, pattern = rename_source_key(name, renamings, converters, reverse=True)
            if pattern is None:
                yield stored, tensor
                continue
            found = next(each for each in converters if pattern in each.source_patterns)
            converter = waiting.setdefault(stored, deepcopy(found))
            converter.add_tensor(stored, name, pattern, tensor)  # type: ignore[arg-type]  # a future or a tensor
            if set(converter.collected_tensors) == set(converter.source_patterns):
                yield from self._stored(stored, waiting.pop(stored))
        for stored, converter in waiting.items():
            yield from self._stored(stored, converter)

    @torch.no_grad()
    def _stored(self, first: str, converter: WeightConverter) -> Iterator[tuple[str, Tensor]]:
        for name, value in converter.convert(first, model=self._model, config=self._model.config).items():
            yield name, value[0] if isinstance(value, list) else value


def state_names(model: "PreTrainedModel") -> list[str]:
    """Names of the parameters without adapters, and of the persistent buffers."""
    names = [base_name(name) for name, _ in model.named_parameters() if not is_adapter(name)]
    return [*names, *(name for name, _ in persistent_buffers(model))]


def persistent_buffers(model: "PreTrainedModel") -> Iterator[tuple[str, Tensor]]:
    """Names and values of the buffers that checkpoints contain, such as the experts' routing biases."""
    for name, part in model.named_modules():
        for key, buffer in part.named_buffers(recurse=False):
            if key not in part._non_persistent_buffers_set:
                yield f"{name}.{key}" if name else key, buffer


def _split(transforms: list[WeightTransform]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    return renamings, [each for each in transforms if isinstance(each, WeightConverter)]


def _all_targets(first: str, converter: WeightConverter | None) -> list[str]:
    if converter is None:
        return [first]
    return [first.replace(converter.target_patterns[0], pattern) for pattern in converter.target_patterns]


def stacks_experts(converter: WeightConverter) -> bool:
    """Whether row i of the result is made from tensor i of each pattern only."""
    first, *others = converter.operations
    dims = [getattr(each, name) for each in others for name in ("dim", "dim0", "dim1") if hasattr(each, name)]
    return isinstance(first, MergeModulelist) and first.dim == 0 and 0 not in dims
