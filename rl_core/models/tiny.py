"""An offline model: a small Qwen3 with a character tokenizer and a chat template, built in code.

It is saved as an ordinary Hugging Face folder, so that everything after it takes the path of a real model.
"""

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rl_core.config.schema import TinyModelConfig

SPECIAL_TOKENS = ["<pad>", "<unk>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CHARACTERS = string.digits + string.ascii_lowercase + "+-*/=#.,:?()$%\"'{}[]"
VOCAB_SIZE = 64

# Every turn is closed by <|end|>, so the text of a conversation only ever grows at its end.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; white space only separates and is not a token."""
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    assert len(vocab) <= VOCAB_SIZE
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.Split(Regex(r"\S"), "isolated")]
    )
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t.startswith("<|") and t != "<|end|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_config(shape: TinyModelConfig, max_length: int) -> Qwen3Config:
    """The architecture: heads of 64 channels (vLLM's CPU attention refuses small ones), tied embeddings."""
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
