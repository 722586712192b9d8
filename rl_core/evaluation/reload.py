"""The test that a registered version is the policy that was trained: a process that knows nothing of the run loads its
folder in vLLM and compares.

`python -m rl_core.evaluation.reload` reads the question as JSON from its standard input and prints the answer as JSON.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import TransientError

MARK = "reload: "
"""Begins the line of the answer; libraries print others."""
LAST_WORDS = 300
"""Characters of what a failed process printed last."""


@dataclass(frozen=True)
class Question:
    """What the folder must reproduce: log-probs of fixed tokens from the second on, and greedy first turns.

    Sequences are cut to `max_length` − 1 tokens, as the engine writes one more.
    """

    folder: str
    dtype: str
    max_length: int
    tensor_parallel_size: int
    gpu_memory_utilization: float
    canary_ids: list[int]
    canary_log_probs: list[float]
    turns: list[dict[str, list[int]]]
    """`prompt_ids` and `response_ids` of each."""


def reload_test(question: Question, env: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    """`log_prob_difference` and `greedy_gap` (nats, the largest of all tokens), or `problem` in words.

    `greedy_gap` is how much less likely a token of the recorded greedy answers is than the likeliest one in its place.
    """
    command = [sys.executable, "-m", "rl_core.evaluation.reload"]
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **env, "PYTHONPATH": path},
            input=json.dumps(asdict(question)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"no answer within {timeout_s:g} s"}
    if done.returncode in (-signal.SIGKILL, -signal.SIGTERM):  # by the kernel, say, for want of memory
        raise TransientError(f"the process that loads the version was killed (exit code {done.returncode})")
    answers = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not answers:
        return {"problem": f"exit code {done.returncode}: {' '.join(done.stdout.split())[-LAST_WORDS:]}"}
    answer: dict[str, Any] = json.loads(answers[-1])
    return answer


def answer(question: Question) -> dict[str, float]:
    """Loads the folder and compares; in the process of its own."""
    import numpy as np
    import torch
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    on_gpu = torch.cuda.is_available()
    memory: dict[str, Any] = {"block_size": 32, "kv_cache_memory_bytes": 2**28}
    if on_gpu:
        memory = {"gpu_memory_utilization": question.gpu_memory_utilization}
    most = question.max_length - 1
    llm = LLM(
        question.folder,
        dtype=question.dtype,  # type: ignore[arg-type]
        max_model_len=question.max_length,
        skip_tokenizer_init=True,
        enforce_eager=True,
        tensor_parallel_size=question.tensor_parallel_size if on_gpu else 1,
        **memory,
    )
    turns = [(turn["prompt_ids"] + turn["response_ids"])[:most] for turn in question.turns]
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    sequences = [question.canary_ids[:most], *turns]
    outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in sequences], params, use_tqdm=False)
    tables = [output.prompt_logprobs[1:] for output in outputs if output.prompt_logprobs]
    canary = [table[token].logprob for table, token in zip(tables[0], sequences[0][1:], strict=True) if table]
    wanted = question.canary_log_probs[: len(canary)]
    gaps = [
        max(each.logprob for each in table.values()) - table[token].logprob
        for turn, ids, positions in zip(question.turns, turns, tables[1:], strict=True)
        for i, (table, token) in enumerate(zip(positions, ids[1:], strict=True), 1)
        if table and i >= len(turn["prompt_ids"])
    ]
    return {
        "log_prob_difference": float(np.abs(np.subtract(canary, wanted)).max()),
        "greedy_gap": float(np.max([0.0, *gaps])),  # numpy's, which does not pass over NaN
    }


if __name__ == "__main__":
    print(f"\n{MARK}{json.dumps(answer(Question(**json.load(sys.stdin))))}")
