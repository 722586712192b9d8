"""Loads a folder as vLLM's users do and prints what it serves, as JSON: load_export.py FOLDER TOKEN_ID…"""

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

if __name__ == "__main__":
    folder, ids = sys.argv[1], [int(token) for token in sys.argv[2:]]
    llm = LLM(folder, max_model_len=64, block_size=32, kv_cache_memory_bytes=2**26, enforce_eager=True, dtype="float32")
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=ids)], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    places = zip(output.prompt_logprobs[1:], ids[1:], strict=True)
    tokenizer: Any = llm.get_tokenizer()
    served = {
        "log_probs": [table[token].logprob for table, token in places if table],
        "temperature": llm.get_default_sampling_params().temperature,
        "chat": tokenizer.apply_chat_template([{"role": "user", "content": "1 2"}], tokenize=False),
        "end": tokenizer.eos_token,
    }
    print("\n" + json.dumps(served))
