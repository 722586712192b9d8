"""Reload test: a process of its own loads a registered version with the run's engine and compares it with the policy.

`python -m rl_core.evaluation.reload` reads a `Question` as JSON from standard input and prints the answer as JSON.
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
"""Prefix of the line with the answer; libraries print to the same stream."""
Table = list[tuple[float, float]]
"""Log-prob of each token of a sequence from the second one on, and of the most likely token at its place."""
OUTPUT_TAIL = 300
"""Number of trailing characters of a failed process's output included in its error."""


@dataclass(frozen=True)
class Question:
    """What the folder must reproduce: log-probs of fixed tokens, starting at the second one, and greedy first turns.

    Sequences are truncated to `max_length` − 1 tokens because the engine generates one more.
    """

    folder: str
    engine: str
    """`vllm`, or `transformers` for its own forward pass."""
    dtype: str
    max_length: int
    tensor_parallel_size: int
    gpu_memory_utilization: float
    canary_ids: list[int]
    canary_log_probs: list[float]
    turns: list[dict[str, list[int]]]
    """`prompt_ids` and `response_ids` of each turn."""


def reload_test(question: Question, env: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    """Returns `log_prob_difference` and `greedy_gap` (nats, maximum over all tokens), or a message as `problem`.

    `greedy_gap` is the difference between the log-prob of the most likely token and that of the recorded greedy token.
    Raises TransientError if the process is killed by a signal.
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
    if done.returncode in (-signal.SIGKILL, -signal.SIGTERM):  # such as by the out-of-memory killer
        raise TransientError(f"the process that loads the version was killed (exit code {done.returncode})")
    answers = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not answers:
        return {"problem": f"exit code {done.returncode}: {' '.join(done.stdout.split())[-OUTPUT_TAIL:]}"}
    answer: dict[str, Any] = json.loads(answers[-1])
    return answer


def answer(question: Question) -> dict[str, float]:
    """Loads the folder and compares; runs in a separate process."""
    import numpy as np

    longest = question.max_length - 1
    turns = [(turn["prompt_ids"] + turn["response_ids"])[:longest] for turn in question.turns]
    sequences = [question.canary_ids[:longest], *turns]
    canary, *tables = (_with_vllm if question.engine == "vllm" else _with_transformers)(question, sequences)
    expected = question.canary_log_probs[: len(canary)]
    gaps = [
        highest - own
        for turn, table in zip(question.turns, tables, strict=True)
        for own, highest in table[len(turn["prompt_ids"]) - 1 :]
    ]
    return {
        "log_prob_difference": float(np.abs(np.subtract([own for own, _ in canary], expected)).max()),
        "greedy_gap": float(np.max([0.0, *gaps])),  # numpy's maximum propagates NaN
    }


def _with_vllm(question: Question, sequences: list[list[int]]) -> list[Table]:
    import torch
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    on_gpu = torch.cuda.is_available()
    memory: dict[str, Any] = {"block_size": 32, "kv_cache_memory_bytes": 2**28}
    if on_gpu:
        memory = {"gpu_memory_utilization": question.gpu_memory_utilization}
    llm = LLM(
        question.folder,
        trust_remote_code=False,
        dtype=question.dtype,  # type: ignore[arg-type]
        max_model_len=question.max_length,
        skip_tokenizer_init=True,
        enforce_eager=True,
        tensor_parallel_size=question.tensor_parallel_size if on_gpu else 1,
        **memory,
    )
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in sequences], params, use_tqdm=False)
    return [
        [
            (position[token].logprob, max(each.logprob for each in position.values()))
            for token, position in zip(ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
            if position
        ]
        for ids, output in zip(sequences, outputs, strict=True)
    ]


def _with_transformers(question: Question, sequences: list[list[int]]) -> list[Table]:
    import torch
    from transformers import AutoModelForCausalLM

    from rl_core.models.load import body, logit_transform
    from rl_core.models.log_probs import LOGIT_CHUNK

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, question.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(
        question.folder, dtype=dtype, local_files_only=True, trust_remote_code=False
    )
    model.to(device).eval()
    transform = logit_transform(model.config)
    tables: list[Table] = []
    for ids in sequences:
        with torch.inference_mode():
            ids_T, table = torch.tensor(ids, device=device), list[tuple[float, float]]()
            hidden_TD = body(model)(input_ids=ids_T[None], use_cache=False).last_hidden_state[0, :-1]
            # One chunk of logits is in memory at a time, as in training.
            for hidden_ND, label_N in zip(hidden_TD.split(LOGIT_CHUNK), ids_T[1:].split(LOGIT_CHUNK), strict=True):
                log_prob_NV = transform(model.get_output_embeddings()(hidden_ND).float()).log_softmax(-1)
                own_N = log_prob_NV.gather(1, label_N[:, None]).squeeze(1)
                table += zip(own_N.tolist(), log_prob_NV.amax(-1).tolist(), strict=True)
        tables.append(table)
    return tables


if __name__ == "__main__":
    print(f"\n{MARK}{json.dumps(answer(Question(**json.load(sys.stdin))))}")
