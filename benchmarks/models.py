"""Which model families the library computes exactly: the table of docs/models.md.

    python -m benchmarks.models [--push] [FAMILY …]

Each family is a narrow random model (rl_core/models/narrow.py) of transformers' default config, with settings that
reach the family's own code. The columns are the differences of log-probs (nats) and gradients (relative) between the
training forward pass and transformers' own, the round trip of all tensors from the checkpoint's layout to the
parameters and back through a push and through an export. With `--push`, a table of the differences of log-probs after a
push of other weights into vLLM instead, each in a process of its own.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedConfig

from rl_core.models.conversion import Conversion
from rl_core.models.load import PolicyModel, empty_causal_lm
from rl_core.models.parity import narrow_model, parity
from rl_core.models.weights import WeightFiles, load_weights

SETTINGS: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.1, "residual_multiplier": 0.5},
    "granitemoe": {"logits_scaling": 4.0},
    "granitemoehybrid": {"logits_scaling": 4.0, "layer_types": ["mamba", "attention"] * 16},
    "falcon_h1": {"lm_head_multiplier": 0.5},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "mistral": {"sliding_window": 4096},
    "ministral": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "moe_topk": 2, "num_experts": 8},
    "nemotron": {"num_key_value_heads": 8},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"},
    "dots1": {"n_routed_experts": 32, "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
}
"""Settings of a family's config beyond transformers' default."""

FAMILIES = (
    # Attention in every layer, dense.
    *("llama", "qwen2", "qwen3", "mistral", "ministral", "ministral3", "phi", "phi3", "smollm3", "starcoder2", "arcee"),
    *("gemma", "gemma2", "gemma3_text", "vaultgemma", "granite", "cohere", "cohere2", "olmo", "olmo2", "olmo3", "glm"),
    *("glm4", "exaone4", "seed_oss", "ernie4_5", "hunyuan_v1_dense", "helium", "apertus", "nemotron", "stablelm"),
    *("gpt2", "gpt_neox", "opt", "bloom", "codegen", "nanochat", "gemma3n_text", "gemma4_text"),
    # Mixtures of experts.
    *("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "glm4_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "minimax_m2"),
    *("granitemoe", "ernie4_5_moe", "phimoe", "dots1", "hunyuan_v1_moe", "afmoe", "llama4_text"),
    # Recurrences and convolutions.
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lfm2", "lfm2_moe", "bamba", "mamba", "mamba2", "falcon_h1"),
    *("falcon_mamba", "jamba", "zamba2", "nemotron_h", "granitemoehybrid", "kimi_linear", "recurrent_gemma", "minimax"),
)
MAX_LENGTH = 1 << 20
"""Longer than every window, so that windows are shorter than a sequence."""
WORKING = "ok"


@dataclass(frozen=True)
class Row:
    """One family's line of the table."""

    family: str
    log_prob: str
    gradient: str
    limit: str
    round_trip: str
    verdict: str


def config_of(family: str) -> PreTrainedConfig:
    """transformers' default config of the family with `SETTINGS`."""
    config: PreTrainedConfig = AutoConfig.for_model(family, **SETTINGS.get(family, {}))
    return config


def examine(family: str) -> Row:
    """The family's line; whatever fails is its verdict."""
    try:
        seen = parity(config_of(family), MAX_LENGTH)
    except Exception as error:  # each family fails in its own way
        return Row(family, "–", "–", "–", "–", f"refused: {_line(error)}")
    numbers = f"{seen.log_prob:.0e}", f"{seen.gradient:.0e}", f"{seen.limit:.0e}"
    if not seen.is_exact:
        return Row(family, *numbers, "–", "refused: above the limit")
    with tempfile.TemporaryDirectory() as directory:
        narrow_model(config_of(family), MAX_LENGTH).save_pretrained(directory)
        trip = round_trip(Path(directory))
    return Row(family, *numbers, trip, "exact" if trip == WORKING else f"refused: {trip}")


def round_trip(folder: Path) -> str:
    """`WORKING`, or what differs after tensors were loaded, and pushed or exported again."""
    try:
        policy = PolicyModel(empty_causal_lm(folder))
        load_weights(policy, policy.hf, folder, torch.device("cpu"))
    except Exception as error:  # each family fails in its own way
        return _line(error)
    stored = _tensors(folder)
    pushed = dict(Conversion(policy.hf, WeightFiles(folder).file_of).to_stored(policy.hf.state_dict().items()))
    with tempfile.TemporaryDirectory() as directory:
        policy.hf.save_pretrained(directory)
        exported = _tensors(Path(directory))
    for what, seen in (("push", pushed), ("export", exported)):
        wrong = [name for name in stored if name not in seen or not torch.equal(stored[name], seen[name])]
        if wrong:
            return f"{len(wrong)} tensors of the {what} differ, such as {wrong[0]}"
    return WORKING


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _in_process(family: str, folder: Path) -> str:
    """The largest difference of log-probs after a push into vLLM, measured in a process of its own."""
    narrow_model(config_of(family), MAX_LENGTH).save_pretrained(folder)
    command = [sys.executable, "-m", "benchmarks.models", "--pushed-to", str(folder), family]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except subprocess.TimeoutExpired:
        return "no answer in 600 s"
    lines = [line for line in done.stdout.splitlines() if line.startswith("pushed: ")]
    return lines[-1].removeprefix("pushed: ") if lines else f"refused: {_last(done.stderr)}"


def push(folder: Path) -> float:
    """Starts vLLM with the folder's weights halved, pushes the folder's own, and compares log-probs of fixed tokens."""
    import torch.distributed as dist
    from safetensors.torch import save_file

    from rl_core.config.schema import RolloutConfig
    from rl_core.models.load import Packed
    from rl_core.rollout.engine.vllm_engine import VLLMEngine

    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29555",
    }
    dist.init_process_group("gloo")
    policy = PolicyModel(empty_causal_lm(folder))
    load_weights(policy, policy.hf, folder, torch.device("cpu"))
    wanted = {name: tensor.clone() for name, tensor in policy.hf.state_dict().items()}
    for file in folder.glob("*.safetensors"):
        halved = {name: tensor / 2 if tensor.ndim > 1 else tensor for name, tensor in load_file(file).items()}
        save_file(halved, file, metadata={"format": "pt"})
    engine = VLLMEngine(folder, RolloutConfig(max_num_seqs=2), "float32", 64, torch.device("cpu"))
    engine.update_weights(wanted.items(), 1)
    ids = torch.randint(3, 300, (24,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        seen = policy(Packed(ids, [len(ids)], torch.device("cpu")), torch.arange(1, len(ids)), 1.0)[0]
    return float((torch.tensor(engine.log_probs(ids.tolist())) - seen).abs().max())


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:120]


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if "Error" in line and not line.startswith(" ")]
    return (lines[0] if lines else "no message")[-120:]


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--push", action="store_true", help="push into vLLM instead")
    parser.add_argument("--pushed-to", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.pushed_to:
        print(f"pushed: {push(arguments.pushed_to):.0e}", flush=True)
        os._exit(0)  # vLLM's threads
    if arguments.push:
        print("| family | difference |\n|---|---|")
        for family in arguments.families:
            with tempfile.TemporaryDirectory() as directory:
                print(f"| {family} | {_in_process(family, Path(directory))} |", flush=True)
        return
    print("| family | log-probs (nats) | gradients (relative) | limit | round trip | verdict |")
    print("|---|---|---|---|---|---|")
    for family in arguments.families:
        row = examine(family)
        cells = (row.family, row.log_prob, row.gradient, row.limit, row.round_trip, row.verdict)
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
