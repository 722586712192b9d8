"""Offline model: a small Qwen3 with a character tokenizer and a chat template, built in code.

It is saved as a standard Hugging Face folder, so that all later code treats it like any other model. Files and
weights are those of transformers' own Qwen3ForCausalLM, whose code takes seconds to import: a driver needs none of it.
"""

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rl_core.config.schema import TinyModelConfig
from rl_core.models.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, build_tokenizer

__all__ = ["build_tokenizer", "save_tiny_model", "tiny_config"]

EMBEDDING = "model.embed_tokens.weight"
_SPECIAL_IDS = {"eos_token_id": SPECIAL_TOKENS.index("<|end|>"), "pad_token_id": SPECIAL_TOKENS.index("<pad>")}


def tiny_config(shape: TinyModelConfig, max_length: int) -> dict[str, Any]:
    """Content of config.json: heads of 64 channels (vLLM's CPU attention does not support smaller ones), tied
    embeddings."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": 4 * shape.hidden_size,
        "layer_types": ["full_attention"] * shape.layers,
        "max_position_embeddings": max_length,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.heads,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": None,
        "transformers_version": version("transformers"),
        **_SPECIAL_IDS,
    }


def save_tiny_model(folder: Path, shape: TinyModelConfig, max_length: int, seed: int) -> None:
    """Writes a freshly initialised model and its tokenizer; the same seed gives the same bytes."""
    config = tiny_config(shape, max_length)
    generation = {"_from_model_config": True, "output_attentions": False, "output_hidden_states": False, **_SPECIAL_IDS}
    generation |= {name: config[name] for name in ("transformers_version", "use_cache")}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"config.json": config, "generation_config.json": generation}.items():
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        save_file(dict(_first_weights(config)), folder / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer().save_pretrained(folder)


def _first_weights(config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The weights that transformers' Qwen3ForCausalLM draws with the same random generator."""
    matrices = list(_matrices(config))
    for name, shape in matrices:  # torch's own initialisation, which transformers then replaces
        torch.empty(shape).normal_() if name == EMBEDDING else torch.empty(shape).uniform_()
    for name, shape in matrices:
        weight = torch.empty(shape).normal_(0.0, config["initializer_range"])
        if name == EMBEDDING:
            weight[config["pad_token_id"]] = 0.0
        yield name, weight
    yield "model.norm.weight", torch.ones(config["hidden_size"])
    for layer in range(config["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{norm}.weight", torch.ones(config["hidden_size"])
        for norm in ("q_norm", "k_norm"):
            yield f"model.layers.{layer}.self_attn.{norm}.weight", torch.ones(config["head_dim"])


def _matrices(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names and shapes of embedding and linear layers, in the order of construction."""
    hidden, inner, heads = (
        config["hidden_size"],
        config["intermediate_size"],
        config["num_attention_heads"] * config["head_dim"],
    )
    yield EMBEDDING, (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        for part in ("q_proj", "k_proj", "v_proj"):
            yield f"model.layers.{layer}.self_attn.{part}.weight", (heads, hidden)
        yield f"model.layers.{layer}.self_attn.o_proj.weight", (hidden, heads)
        for part in ("gate_proj", "up_proj"):
            yield f"model.layers.{layer}.mlp.{part}.weight", (inner, hidden)
        yield f"model.layers.{layer}.mlp.down_proj.weight", (hidden, inner)
