"""Parts that tests of several folders are put together from; also imported by the processes that tests start."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from rl_core.config.schema import (
    ActorConfig,
    AgentConfig,
    FSDPConfig,
    LoraConfig,
    OptimConfig,
    RunConfig,
    TinyModelConfig,
)
from rl_core.data.protocol import DataProto
from rl_core.models.load import PolicyModel, ValueModel, empty_causal_lm
from rl_core.models.lora import add_adapters
from rl_core.models.tiny import build_tokenizer, save_tiny_model, tiny_config
from rl_core.models.weights import load_weights
from rl_core.rollout.agent.agent_loop import roll_out
from rl_core.rollout.engine.protocol import Completion, RolloutEngine, Sampling
from rl_core.rollout.trajectory import Trajectory, to_batch
from rl_core.storage.store import Store
from rl_core.training.engine import TrainEngine
from rl_core.training.losses import policy_loss
from rl_core.training.mesh import RankMesh
from rl_core.training.sharded_checkpoint import save_engine

CPU = torch.device("cpu")
ALONE = RankMesh(CPU, None, None)  # type: ignore[arg-type]
WIDTH = 8
# Prompt and response tokens of each row; the first half is much longer, so that ranks need different numbers of
# micro-batches.
LENGTHS = [(9, 8), (12, 8), (10, 7), (11, 8), (3, 1), (2, 4), (4, 2), (3, 3)]


def save_sharp_model(folder: Path, heads: int = 2) -> None:
    """The offline model with larger embeddings: its fresh weights alone would give nearly uniform log-probs."""
    save_tiny_model(folder, TinyModelConfig(hidden_size=64, layers=1, heads=heads), 64, seed=0)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(4)
        model.model.layers[0].self_attn.o_proj.weight.mul_(5)
    model.save_pretrained(folder)


def save_grouped_model(folder: Path) -> None:
    """A Llama of two layers with 4 query heads on 2 key/value heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def start_ranks(script: Path, world_size: int, *arguments: object) -> None:
    """Runs a script as `script RANK WORLD_SIZE ARGUMENT …` in a process a rank; raises with the first one's errors."""
    path = [str(script.parents[2]), str(script.parents[1]), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, (rank, world_size, *arguments))], env=env, stderr=subprocess.PIPE
        )
        for rank in range(world_size)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=900)
            assert rank.returncode == 0, errors.decode()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def save_reward_model(folder: Path, template: bool = True, pad: bool = True) -> None:
    """A tiny sequence classifier with one label; its vocabulary is not the offline model's."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["sort", "0", "1"])
    if not template:
        tokenizer.chat_template = None
    config = Qwen3Config(**tiny_config(TinyModelConfig(hidden_size=64, layers=2, heads=1), 48))
    config.vocab_size, config.num_labels = len(tokenizer), 1
    if not pad:
        config.pad_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Qwen3ForSequenceClassification(config)
        model.score.weight.data.normal_(std=0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def policy_engine(
    path: Path,
    rank_mesh: RankMesh,
    optim: OptimConfig | None = None,
    max_tokens: int = 4096,
    updates: int = 10,
    config: FSDPConfig | None = None,
    dtype: str = "float32",
    lora: LoraConfig | None = None,
) -> TrainEngine:
    """A policy engine from a checkpoint, with adapters if given."""
    model = empty_causal_lm(path)
    policy = PolicyModel(add_adapters(model, lora) if lora else model)
    return TrainEngine(policy, path, rank_mesh, config or FSDPConfig(), dtype, optim, updates, max_tokens)


Module = TypeVar("Module", PolicyModel, ValueModel)


def loaded(module: Module, path: Path) -> Module:
    """A module of this process alone, unsharded, with the weights of a checkpoint."""
    load_weights(module, module.hf, path, CPU)
    return module


def rows_of(lengths: list[tuple[int, int]], seed: int = 0) -> DataProto:
    """Random rows with the lengths (prompt, response) as a batch, ready for the policy loss.

    One token in the middle of the first row, and the whole last row, are not the policy's (mask 0).
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(0, 64, (n,), generator=generator).tolist()

    rows = to_batch([Trajectory(draw(p), 0, response_ids=draw(r), response_mask=[1] * r) for p, r in lengths], WIDTH)
    mask_BR = rows.batch["response_mask"]
    mask_BR[0, lengths[0][1] // 2] = 0
    mask_BR[-1] = 0
    noise_BR = torch.randn(mask_BR.shape, generator=generator)
    advantages_BR = torch.randn(mask_BR.shape, generator=generator) * mask_BR
    return rows.union(DataProto({"noise": noise_BR, "advantages": advantages_BR}))


def off_policy(engine: TrainEngine, rows: DataProto) -> DataProto:
    """The rows with old log-probs a little off the engine's, so that some ratios are clipped, and a reference."""
    log_probs_BR = engine.compute(rows, 1.0)[0]
    old_BR = log_probs_BR + 0.2 * rows.batch["noise"]
    return rows.union(DataProto({"old_log_probs": old_BR, "ref_log_prob": old_BR - 0.1}))


def update(
    engine: TrainEngine, rows: DataProto, tokens: float, sequences: float, config: ActorConfig
) -> dict[str, float]:
    """One optimizer step on these rows of a mini-batch with the given counts."""
    return engine.train_mini_batch(rows, policy_loss(RunConfig(actor=config), tokens, sequences), 1.0)


def update_alone(engine: TrainEngine, rows: DataProto, config: ActorConfig | None = None) -> dict[str, float]:
    """One optimizer step on a mini-batch that this process has alone."""
    tokens = rows.batch["response_mask"].sum().item()
    return update(engine, rows, tokens, len(rows), config or ActorConfig())


def weights_of(engine: TrainEngine) -> dict[str, Tensor]:
    """Copies of all weights and Adam moments, gathered over the ranks; `exp_avg` after one step is a gradient."""
    state = engine.state()
    return {
        f"{part}.{name}": tensor.full_tensor().cpu().clone()  # type: ignore[attr-defined]
        for part in ("model", "exp_avg", "exp_avg_sq")
        for name, tensor in cast(dict[str, Tensor], state[part]).items()
    }


def save(engine: TrainEngine, store: Store, folder: str) -> None:
    """Writes the engine's state into `folder` of the store and waits for it; all ranks take part."""
    save_engine(engine, store, folder, dist.new_group(backend="gloo")).result()


def complete(engine: RolloutEngine, prompts: list[list[int]], seeds: list[int], sampling: Sampling) -> list[Completion]:
    """One turn a prompt, all decoded together."""

    async def all_of_them() -> list[Completion]:
        turns = [engine.generate(ids, seed, sampling) for ids, seed in zip(prompts, seeds, strict=True)]
        return await asyncio.gather(*turns)

    return asyncio.run(all_of_them())


def single_turns(engine: RolloutEngine, prompts: DataProto, sampling: Sampling) -> DataProto:
    """The rows with a response of one turn each."""
    return asyncio.run(roll_out(engine, prompts, sampling, AgentConfig()))


def distance(a: dict[str, Tensor], b: dict[str, Tensor], prefix: str = "") -> float:
    """L2 distance of the tensors whose names begin with `prefix`, relative to the norm of `b`."""
    names = [name for name in b if name.startswith(prefix)]
    assert names and a.keys() == b.keys()
    difference = torch.stack([(a[name] - b[name]).norm() for name in names]).norm()
    return float(difference / torch.stack([b[name].norm() for name in names]).norm())


def plain_log_probs(path: Path, prompt: list[int], response: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probs [R] of the response after the prompt from the unchanged transformers model at `path`."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return plain_outputs(model, prompt, response, temperature)[0]


def plain_outputs(
    model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [R] of the response by the model's ordinary forward of this one sequence."""
    logits_TV = model(torch.tensor([prompt + response])).logits[0] / temperature
    distribution = torch.distributions.Categorical(logits=logits_TV[len(prompt) - 1 : -1])
    return distribution.log_prob(torch.tensor(response)), distribution.entropy()
