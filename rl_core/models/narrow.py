"""A narrow copy of a model's config with few layers, for checks of a family's code in seconds on a CPU."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

VOCABULARY = 512
_MIN_WIDTH, _INNER = 64, 128
_WINDOWS = ("window", "attention_chunk_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_POSITION = ("idx", "index", "layer_id", "layer_number", "training")
"""Parts of the names of module attributes that only count layers."""


def narrow_configs(config: PreTrainedConfig, window: int | None) -> Iterator[PreTrainedConfig]:
    """Narrow copies of the config, the smallest first, that keep its kinds of layers; the last ones keep its widths.

    Not every one is valid: the first one that transformers builds and runs is as good as any. Attention windows become
    `window` tokens; None keeps them.
    """
    text = config.get_text_config()
    total = int(getattr(text, "num_hidden_layers", 0) or 0)
    for divisor in _divisors(text):
        whole = _narrow(config, divisor, total, window)
        layers = _kinds_of_layers(whole, total) if whole else total
        for count in dict.fromkeys((layers, total)):
            if narrow := _narrow(config, divisor, count, window):
                yield narrow


def has_experts(config: PreTrainedConfig) -> bool:
    """Whether a token uses only some of the model's parameters."""
    text = config.get_text_config()
    return any((getattr(text, name, None) or 0) > 1 for name in _EXPERTS)


def _divisors(text: PreTrainedConfig) -> list[int]:
    """Divisors of the widths, the largest first, that keep several heads and a grouping of them."""
    heads, kv_heads = (getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads"))

    def keeps(divisor: int) -> bool:
        several = not isinstance(heads, int) or heads // divisor >= 2
        grouped = not isinstance(kv_heads, int) or kv_heads == 1 or kv_heads % divisor == 0
        return text.hidden_size // divisor >= _MIN_WIDTH and several and grouped

    return [*filter(keeps, (32, 16, 8, 4, 2)), 1]


def _narrow(config: PreTrainedConfig, divisor: int, layers: int, window: int | None) -> PreTrainedConfig | None:
    values = config.to_dict()
    total = int(getattr(config.get_text_config(), "num_hidden_layers", 0) or 0)
    try:
        return type(config).from_dict(_changed(values, divisor, total, layers, window))
    except Exception:  # each family validates its values with errors of its own
        return None


def _changed(values: dict[str, Any], divisor: int, total: int, layers: int, window: int | None) -> dict[str, Any]:
    changed = {}
    for name, value in values.items():
        if isinstance(value, dict):
            is_part = "model_type" in value
            value = _changed(value, divisor, total, layers, window) if is_part else value
        elif isinstance(value, list) and len(value) == total > 1:
            value = [_value(name, each, values, divisor, total, layers, window) for each in value[:layers]]
        elif name.endswith(("_token_id", "_token_index", "_token_ids")):
            value = _special(value, values.get("vocab_size") or 0)
        else:
            value = _value(name, value, values, divisor, total, layers, window)
        changed[name] = value
    return changed


def _value(
    name: str, value: Any, values: dict[str, Any], divisor: int, total: int, layers: int, window: int | None
) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name in _LAYERS:
        return layers if value == total else min(value, 2)
    if name.startswith("vocab_size"):
        return min(value, VOCABULARY)
    if name in _EXPERTS:
        chosen = max((values.get(key) or 1 for key in _TOP_K), default=1)
        return min(value, max(8, 4 * chosen))
    if any(part in name for part in _WINDOWS):
        return value if window is None else min(value, window)
    if "intermediate_size" in name and divisor > 1:
        return min(value, _INNER)
    is_width = any(part in name for part in ("hidden_size", "heads", "n_embd", "d_model", "width"))
    is_width = is_width or name in ("d_inner", "ffn_dim", "n_inner", "mamba_d_ssm", "conv_dim", "block_dim", "n_head")
    return value // divisor if is_width and value % divisor == 0 and value // divisor > 0 else value


def _special(value: Any, vocab_size: int) -> Any:
    """Special tokens at the end of the small vocabulary, so that drawn tokens are ordinary ones."""
    if vocab_size <= VOCABULARY or value is None:
        return value
    if isinstance(value, list):
        return [_special(each, vocab_size) for each in value]
    return VOCABULARY - 1 - value % 16 if isinstance(value, int) and value >= 0 else value


def _kinds_of_layers(config: PreTrainedConfig, total: int) -> int:
    """Length of the shortest prefix of at least two layers that has every kind of layer of the model."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception:  # this width is not valid for the family
        return total
    found: set[object] = set()
    length = min(2, total)
    for stack in (part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == total):
        for position, layer in enumerate(stack):
            kind = _kind(layer)
            if kind not in found:
                found.add(kind)
                length = max(length, position + 1)
    return length


def _kind(layer: nn.Module) -> object:
    """Classes, shapes and plain attributes of a layer's parts."""
    parts = []
    for name, part in layer.named_modules():
        plain = tuple(
            (key, value)
            for key, value in sorted(vars(part).items())
            if isinstance(value, (bool, int, float, str)) and not any(each in key for each in _POSITION)
        )
        shapes = tuple((key, tuple(each.shape)) for key, each in part.named_parameters(recurse=False))
        parts.append((name, type(part).__name__, plain, shapes))
    return tuple(parts)
