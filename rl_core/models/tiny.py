"""Offline model: a small Qwen3 with a character tokenizer and a chat template, built in code.

It is saved as a standard Hugging Face folder, so that all later code treats it like any other model.
"""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_core.config.schema import TinyModelConfig
from rl_core.models.tokenizer import SPECIAL_TOKENS, VOCAB_SIZE, build_tokenizer

__all__ = ["build_tokenizer", "save_tiny_model", "tiny_config"]


def tiny_config(shape: TinyModelConfig, max_length: int) -> Qwen3Config:
    """Architecture: heads of 64 channels (vLLM's CPU attention does not support smaller ones), tied embeddings."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden_size,
        intermediate_size=4 * shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=64,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index("<|end|>"),
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
    )


def save_tiny_model(folder: Path, shape: TinyModelConfig, max_length: int, seed: int) -> None:
    """Writes a freshly initialised model and its tokenizer; the same seed gives the same bytes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(tiny_config(shape, max_length))
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
