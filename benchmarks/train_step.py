"""Measures speed and memory of training steps of a 0.49B model against a plain FSDP2 baseline.

python -m benchmarks.train_step [GPUS=all] [NAME …]: one process per GPU, one row per case. The baseline is FSDP2 around
the model as implemented in transformers: padded rows, SDPA attention, logits of all tokens at once, activation
checkpointing.

MFU is model FLOPs divided by the card's dense bfloat16 peak: 6 per parameter and token, and with attention an
additional 12 · layers · width · context per token (the full square, as is customary, although half of it is masked).
Recomputation is not counted.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, Qwen3Config

from rl_core.config.schema import FSDPConfig, OptimConfig, RunConfig
from rl_core.data.protocol import DataProto
from rl_core.models.load import PolicyModel, empty_causal_lm
from rl_core.training.engine import TrainEngine
from rl_core.training.gpu_usage import PEAKS
from rl_core.training.losses import policy_loss
from rl_core.training.mesh import make_rank_mesh

LENGTH, PROMPT = 1024, 1
SHAPE = Qwen3Config(
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=LENGTH,
    tie_word_embeddings=True,
)
WARM_UP, ROUNDS, STEPS = 3, 3, 8


@dataclass(frozen=True)
class Case:
    """A measured case: tokens per GPU and step, and the engine's config; None selects the baseline."""

    tokens: int
    engine: FSDPConfig | None = None


CASES = {
    "baseline": Case(16_384),
    "packed": Case(16_384, FSDPConfig()),
    "compiled-16k": Case(16_384, FSDPConfig(compile=True)),
    "compiled": Case(32_768, FSDPConfig(compile=True)),
    "checkpointed": Case(32_768, FSDPConfig(compile=True, activation_checkpointing=True)),
}


def rows_of(count: int, device: torch.device) -> DataProto:
    """Random rows of `LENGTH` tokens for the policy loss; all tokens but the first count as sampled."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    width = LENGTH - PROMPT
    ids = torch.randint(0, SHAPE.vocab_size, (count, LENGTH), generator=generator)
    zeros_BR = torch.zeros(count, width)
    tensors = {
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "prompt_length": torch.full((count,), PROMPT),
        "response_length": torch.full((count,), width),
        "response_mask": torch.ones(count, width),
        "old_log_probs": zeros_BR - 12,
        "advantages": torch.randn(count, width, generator=generator),
    }
    return DataProto(tensors)


class Engine:
    """Rollforward's training engine with the policy loss."""

    def __init__(self, case: Case, folder: Path, device: torch.device) -> None:
        assert case.engine is not None
        place = make_rank_mesh(device, dist.get_world_size(), dist.get_world_size(), 1)
        policy = PolicyModel(empty_causal_lm(folder), case.engine.compile)
        engine, optim = case.engine, OptimConfig(lr=1e-6)
        self.engine = TrainEngine(policy, folder, place, engine, "bfloat16", optim, 1000, case.tokens)
        self.rows = rows_of(case.tokens // LENGTH, device)
        tokens = float(self.rows.batch["response_mask"].sum()) * dist.get_world_size()
        self.loss = policy_loss(RunConfig(), tokens, len(self.rows) * dist.get_world_size())

    def step(self) -> None:
        self.engine.train_mini_batch(self.rows, self.loss, 1.0)


class Baseline:
    """FSDP2 around the transformers model, with log-probs from full float32 logits."""

    def __init__(self, case: Case, folder: Path, device: torch.device) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        model.gradient_checkpointing_enable()
        place = make_rank_mesh(device, dist.get_world_size(), dist.get_world_size(), 1)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model.to(device)
        for layer in model.model.layers:
            fully_shard(layer, mesh=place.mesh, mp_policy=policy)
        fully_shard(model, mesh=place.mesh, mp_policy=policy)
        self.model = model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        rows = rows_of(case.tokens // LENGTH, device).batch
        self.ids = torch.cat([rows["prompts"], rows["responses"]], dim=1).to(device)
        self.advantages = rows["advantages"].to(device)

    def step(self) -> None:
        logits = self.model(self.ids, use_cache=False).logits[:, :-1].float()
        log_probs = F.log_softmax(logits, dim=-1).gather(2, self.ids[:, 1:, None]).squeeze(2)
        (-(self.advantages * log_probs).mean()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(case: Case, folder: Path, device: torch.device) -> tuple[float, float]:
    """Tokens per second and GPU (median of several rounds), and the peak of allocated memory in GiB."""
    torch.compiler.reset()  # otherwise shapes of the previous case cause dynamic kernels
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    variant = Engine(case, folder, device) if case.engine else Baseline(case, folder, device)
    for _ in range(WARM_UP):
        variant.step()
    seconds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(STEPS):
            variant.step()
        torch.cuda.synchronize()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return case.tokens * STEPS / statistics.median(seconds), torch.cuda.max_memory_allocated() / 1024**3


def row(name: str, case: Case, speed: float, peak: float, parameters: int) -> str:
    """Formats a row of the table."""
    card = torch.cuda.get_device_name()
    flops = next((each for kind, each in PEAKS.items() if kind in card), float("nan"))
    width = SHAPE.num_attention_heads * SHAPE.head_dim
    dense, attention = 6 * parameters, 12 * SHAPE.num_hidden_layers * width * LENGTH
    plain, whole = (speed * each / flops for each in (dense, dense + attention))
    return f"| {name} | {case.tokens:,} | {speed:,.0f} | {plain:.2f}, {whole:.2f} | {peak:.1f} GiB |"


def rank_main(folder: Path, names: list[str]) -> None:
    """Runs all cases in the process of one GPU."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(SHAPE, dtype=torch.bfloat16).save_pretrained(folder)
        print(f"{dist.get_world_size()} × {torch.cuda.get_device_name()}, torch {torch.__version__}")
        print(
            "| case | tokens/step per GPU | tokens/s per GPU | MFU 6N, with attention | peak |\n|---|---|---|---|---|"
        )
    dist.barrier()
    parameters = sum(parameter.numel() for parameter in empty_causal_lm(folder).parameters())
    for name in names:
        speed, peak = measure(CASES[name], folder, device)
        if dist.get_rank() == 0:
            print(row(name, CASES[name], speed, peak, parameters), flush=True)
    dist.destroy_process_group()


def main(arguments: list[str]) -> int:
    """Starts one process per GPU."""
    if "LOCAL_RANK" in os.environ:
        rank_main(Path(arguments[0]), arguments[1:])
        return 0
    gpus = arguments.pop(0) if arguments and arguments[0].isdigit() else str(torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        return subprocess.call([*start, "-m", "benchmarks.train_step", folder, *(arguments or CASES)])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
