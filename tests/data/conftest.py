import pytest
from transformers import PreTrainedTokenizerBase

from rl_core.models.tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer()
