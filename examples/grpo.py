"""GRPO in one file: an untrained model learns to sort three digits on two CPU cores, without any download.

python examples/grpo.py [--steps N] [--seed S]

One step: sample a group of responses per prompt, score them, compare each with its group, update the policy, push the
new weights to the sampler. `PPOTrainer.fit` (rl_core/trainer/trainer.py) is this loop with workers, checkpoints and
resume. Suffixes of tensors name their dimensions: B responses (PROMPTS × GROUP of a step), R response tokens.

Measured: `python examples/grpo.py` takes 70 s of one core; mean reward 0.014 -> 0.944, greedy held-out score 0.932.
"""

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from statistics import fmean

from rl_core.cluster.resources import WORKER_ENV

# torch and vLLM read these when they are imported: the engine runs in this process, on one thread (more slow a tiny
# model down), as the only rank.
os.environ.update(WORKER_ENV, OMP_NUM_THREADS="1", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rl_core.algorithms.advantages import grpo
from rl_core.algorithms.masked import aggregate_loss
from rl_core.algorithms.policy_losses import LossSettings, Tokens, vanilla
from rl_core.config.schema import AgentConfig, FSDPConfig, OptimConfig, RolloutConfig, SourceConfig, TinyModelConfig
from rl_core.data.dataset import RLHFDataset
from rl_core.data.loader import StatefulLoader
from rl_core.data.protocol import DataProto
from rl_core.data.rows import Row
from rl_core.data.sources import sort_digits
from rl_core.models.load import PolicyModel, empty_causal_lm, load_tokenizer
from rl_core.models.tiny import save_tiny_model
from rl_core.rewards.scorers import positions
from rl_core.rollout.agent.agent_loop import roll_out
from rl_core.rollout.engine.protocol import RolloutEngine, Sampling
from rl_core.rollout.engine.vllm_engine import VLLMEngine
from rl_core.rollout.weights.weight_sync import ShardingManager
from rl_core.trainer.batch import response_seeds
from rl_core.training.engine import LossFunction, TrainEngine
from rl_core.training.mesh import make_rank_mesh

DIGITS = 3  # a response is exactly this many tokens, so the model need not learn when to stop
PROMPTS, GROUP = 128, 8  # prompts of a step, responses to each
UPDATES = 4  # optimizer steps on the responses of a step; all but the first are off-policy, hence the clipped ratio
LEARNING_RATE = 3e-3
ENTROPY = 0.1  # weight of the entropy bonus: without it an untrained policy settles on one answer for all prompts
MAX_LENGTH = 16  # tokens of prompt and response together
CPU = torch.device("cpu")


def build(folder: Path, updates: int, seed: int) -> tuple[PreTrainedTokenizerBase, TrainEngine, VLLMEngine]:
    """Tokenizer, train engine and rollout engine of a freshly initialised model (86 thousand parameters)."""
    save_tiny_model(folder, TinyModelConfig(hidden_size=64, layers=1, heads=2), MAX_LENGTH, seed)
    # FSDP2 needs a process group even for a single rank; this one has no network.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # Warm-up, as Adam's first steps have full size whatever the gradient; decay to 0, so that the last ones settle.
    optim = OptimConfig(lr=LEARNING_RATE, warmup_steps=5, lr_schedule="linear")
    policy, rank_mesh = PolicyModel(empty_causal_lm(folder)), make_rank_mesh(CPU, 1, 1, 1)
    actor = TrainEngine(policy, folder, rank_mesh, FSDPConfig(), "float32", optim, updates, max_tokens=8192)
    # All responses of a step are decoded together.
    serving = RolloutConfig(max_num_seqs=PROMPTS * GROUP, kv_cache_gb=0.0625)
    return load_tokenizer(folder), actor, VLLMEngine(folder, serving, "float32", MAX_LENGTH, CPU)


def rollout(
    engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, rows: list[Row], temperature: float, seeds: list[int]
) -> tuple[DataProto, Tensor]:
    """One response per row and its reward [B]: the share of digits in the right place."""
    prompts = DataProto.from_dict({}, {"prompt_ids": [row["prompt_ids"] for row in rows], "seed": seeds})
    sampling = Sampling(temperature, max_tokens=DIGITS, stop_token_ids=())
    batch = asyncio.run(roll_out(engine, prompts, sampling, AgentConfig()))
    texts = tokenizer.batch_decode(batch.batch["responses"], skip_special_tokens=True)
    return batch, torch.tensor([positions(text, row) for text, row in zip(texts, rows, strict=True)])


def policy_loss(mini: DataProto) -> LossFunction:
    """PPO's clipped loss with an entropy bonus, averaged over the tokens of a mini-batch.

    The KL penalty of the GRPO paper is left out: an untrained model is no reference worth staying close to.
    """
    tokens = mini.batch["response_mask"].sum().item()

    def share(outputs: tuple[Tensor, ...], rows: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        # Called for each micro-batch of packed rows; dividing by the mini-batch's count makes the shares add up.
        log_prob_BR, entropy_BR, _ = outputs
        mask_BR = rows.batch["response_mask"]
        now = Tokens(log_prob_BR, rows.batch["old_log_probs"], rows.batch["advantages"], mask_BR)
        loss_BR, _ = vanilla(now, LossSettings(clip_low=0.2, clip_high=0.2))
        return aggregate_loss(loss_BR - ENTROPY * entropy_BR, mask_BR, "token-mean", tokens, len(mini)), {}

    return share


def main(steps: int, seed: int) -> None:
    """Trains, printing a line per step, then scores greedy responses to held-out rows."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, actor, engine = build(Path(folder), steps * UPDATES, seed)
    # After every push the canary compares both engines' log-probs of fixed tokens and stops training if they differ.
    sync = ShardingManager(actor, engine, "float32", tolerance=1e-3, max_length=MAX_LENGTH)
    sync.push(version=0)
    train_rows, held_out_rows = sort_digits.rows(SourceConfig(difficulty=DIGITS, val_rows=64), seed)
    train, held_out = RLHFDataset(train_rows, tokenizer), RLHFDataset(held_out_rows, tokenizer)
    loader = StatefulLoader(train.sizes, PROMPTS, seed, data_hash="")
    group_B = torch.arange(PROMPTS).repeat_interleave(GROUP)

    means: list[float] = []
    for step in range(1, steps + 1):
        start = time.perf_counter()
        # Sample: every prompt GROUP times, each time with another seed.
        rows = [train[i] for i in loader.next() for _ in range(GROUP)]
        batch, reward_B = rollout(engine, tokenizer, rows, 1.0, response_seeds([seed, step], len(rows)))
        mask_BR, length_B = batch.batch["response_mask"], batch.batch["response_length"]

        # Compare: advantage = (reward − mean of the group) / standard deviation of the group, on every token.
        rewards_BR = torch.zeros_like(mask_BR)
        rewards_BR[torch.arange(len(rows)), length_B - 1] = reward_B  # a response earns its reward with its last token
        advantages_BR, _ = grpo(rewards_BR, mask_BR, group_B)

        # Learn: the old log-probs are the train engine's own, so the first update's ratio is exactly 1.
        old_BR = actor.compute(batch, 1.0)[0]
        batch = batch.union(DataProto({"advantages": advantages_BR, "old_log_probs": old_BR}))
        losses = [actor.train_mini_batch(mini, policy_loss(mini), 1.0)["loss"] for mini in batch.chunk(UPDATES)]

        # Push: the next step samples from the updated policy.
        canary = sync.push(version=step)
        speed = (batch.batch["prompt_length"] + length_B).sum().item() / (time.perf_counter() - start)
        means.append(reward_B.mean().item())
        figures = f"loss {fmean(losses):+.4f}  canary {canary:.1e}  {speed:,.0f} tokens/s"
        print(f"step {step:3}  reward {means[-1]:.3f}  {figures}", flush=True)

    rows = [held_out[i] for i in range(len(held_out))]
    _, greedy_B = rollout(engine, tokenizer, rows, 0.0, [seed] * len(rows))
    print(f"mean reward {means[0]:.3f} -> {means[-1]:.3f}, greedy held-out score {greedy_B.mean():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
