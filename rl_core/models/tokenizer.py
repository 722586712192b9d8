"""Character tokenizer and chat template of the offline model; does not import torch, so it loads fast."""

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<pad>", "<unk>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CHARACTERS = string.digits + string.ascii_lowercase + "+-*/=#.,:?()$%\"'{}[]"
VOCAB_SIZE = 64

# Every turn is closed by <|end|>, so the template is append-only.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer with one token per character; white space is removed."""
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
