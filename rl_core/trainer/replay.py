"""Replay of a committed step: recomputes advantages and loss from its rollouts, with the functions of training.

The batch is read from the file of `rollout_file.rollout_parquet`: all responses of the step in the order of its
prompts, with the columns computed from them. Nothing is written, and no model is needed.
"""

import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from rl_core.algorithms.advantages import ESTIMATORS
from rl_core.algorithms.kl import KLController
from rl_core.algorithms.policy_losses import POLICY_LOSSES
from rl_core.config.schema import RunConfig
from rl_core.data.protocol import DataProto
from rl_core.errors import InputError
from rl_core.trainer.advantage import apply_correction_and_kl, compute_advantages
from rl_core.trainer.batch import training_rows
from rl_core.trainer.reward_columns import NAMED, apply_overlong_penalty
from rl_core.trainer.rollout_file import rollout_table
from rl_core.training.losses import policy_loss, select_tokens

NEEDED = ("uid", "prompt_ids", "responses", "response_mask", "scored", "entropy", "sum_pi_squared")
DERIVED = ("token_level_shaped", "token_level_rewards", "weights", "advantages", "returns")
"""Columns recomputed from the others."""
TOLERANCE = 1e-6
# Trainer and replay sum in different orders; with bfloat16, log-probs in the update also round differently than before.
LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Comparison:
    """A quantity in training and in replay: both means, and the largest difference between two values."""

    quantity: str
    trained: float
    replayed: float
    difference: float
    tolerance: float

    @property
    def equal(self) -> bool:
        """Whether no value differs by more than the tolerance; non-finite differences are never equal."""
        return self.difference <= self.tolerance


def load_batch(data: bytes, config: RunConfig, where: str) -> DataProto:
    """Reads a step's parquet file as a padded batch; raises InputError if it is damaged or lacks a column."""
    table = rollout_table(data, NEEDED, where)
    tensors: dict[str, Tensor] = {}
    arrays: dict[str, list[Any]] = {}
    for name in table.column_names:
        values, kind = table[name].to_pylist(), table.schema.field(name).type
        if pa.types.is_list(kind):
            width = max(map(len, values)) if name == "prompt_ids" else config.data.max_response_length
            dtype = torch.long if pa.types.is_integer(kind.value_type) else torch.float32
            tensors["prompts" if name == "prompt_ids" else name] = _padded(values, width, dtype)
        elif pa.types.is_string(kind):
            arrays[name] = list(map(json.loads, values)) if name == "calls" else values
        else:
            tensors[name] = torch.tensor(values)
    for name, column in (("prompt_length", "prompt_ids"), ("response_length", "responses")):
        tensors[name] = torch.tensor([len(row) for row in table[column].to_pylist()])
    return DataProto.from_dict(tensors, arrays)


def _padded(rows: list[list[float]], width: int, dtype: torch.dtype) -> Tensor:
    padded = torch.zeros(len(rows), width, dtype=dtype)
    for to, row in zip(padded, rows, strict=True):
        to[: len(row)] = torch.tensor(row, dtype=dtype)
    return padded


def check_recorded(batch: DataProto, config: RunConfig, where: str) -> None:
    """Raises InputError if the config needs a column that the step did not record."""
    estimator, tensors = config.algorithm.estimator, batch.batch
    needs, setting = ESTIMATORS.resolve(estimator).needs, f"algorithm.estimator={estimator}"
    checks = [
        ("values_BR" in needs, "values", "values of the critic", setting),
        ("greedy_reward_B" in needs, "greedy_reward_B", "rewards of greedy responses", setting),
        (
            config.correction.weights != "none" or config.correction.reject != "none",
            "rollout_log_probs",
            "log-probs of the rollout engine",
            "correction.weights or correction.reject",
        ),
        ("named_rewards" in needs, NAMED, "named rewards of the scorer", setting),
        (
            config.needs_reference,
            "ref_log_prob",
            "log-probs of a reference model",
            "actor.kl_loss_coef or algorithm.kl_in_reward_coef above 0",
        ),
    ]
    for needed, column, what, setting in checks:
        if needed and not any(name.startswith(column) for name in tensors):
            raise InputError(
                f"{what}, required by {setting}",
                "none recorded by the step",
                where,
                "choose a setting that does not need them, or replay a run trained with this one",
            )


def replay(batch: DataProto, config: RunConfig, kl_coef: float, step: int) -> tuple[DataProto, float]:
    """Recomputes rewards, weights, advantages and returns with this config; returns the batch and the loss of its first
    mini-batch.

    `kl_coef` is the coefficient of the KL in the reward at that step.
    """
    algorithm = config.algorithm
    tensors = {name: tensor for name, tensor in batch.batch.items() if name not in DERIVED}
    tensors["response_mask"] = tensors.pop("sampled_mask", tensors["response_mask"])
    controller = KLController("fixed", kl_coef, algorithm.kl_target, algorithm.kl_horizon)
    replayed = apply_overlong_penalty(DataProto(tensors, batch.non_tensor_batch), config)
    replayed, _ = apply_correction_and_kl(replayed, config, controller)
    replayed = compute_advantages(replayed, config)
    return replayed, first_loss(replayed, config, step)


@torch.no_grad()
def first_loss(batch: DataProto, config: RunConfig, step: int) -> float:
    """Policy loss of the step's first mini-batch, before any update, when the policy still equals the old one."""
    minis = config.data.train_batch_size // config.mini_batch_size
    shares = training_rows(batch, config, step).chunk(config.data_parallel_size)
    mini = DataProto.concat([share.chunk(minis)[0] for share in shares])
    log_prob_BR, entropy_BR = mini.batch["old_log_probs"], mini.batch["entropy"]
    if "selected_BR" in POLICY_LOSSES.resolve(config.actor.policy_loss).needs:
        updates = (step - 1) * minis * config.actor.ppo_epochs
        mini = select_tokens(config, mini, log_prob_BR, config.trainer.seed + updates)
    tokens_B = mini.batch["response_mask"].sum(-1)
    loss_function = policy_loss(config, tokens_B.sum().item(), float((tokens_B > 0).sum()))
    return loss_function((log_prob_BR, entropy_BR), mini)[0].item()


def compare(trained: DataProto, first: float, replayed: DataProto, loss: float, dtype: str) -> list[Comparison]:
    """Compares each quantity of the committed step with its replay.

    `first` is the recorded loss of the first mini-batch. Differences cover all tokens, means only trained tokens.
    """
    names = {
        "trained tokens": "response_mask",
        "rewards": "token_level_rewards",
        "correction weights": "weights",
        "advantages": "advantages",
        "returns": "returns",
    }
    rows = []
    for quantity, name in names.items():
        if name in trained.batch or name in replayed.batch:
            ours, again = (_column(batch, name) for batch in (trained, replayed))
            difference = (ours - again).abs().max().item()
            shown = torch.sum if name == "response_mask" else torch.mean
            means = shown(_on(trained, ours)).item(), shown(_on(replayed, again)).item()
            rows.append(Comparison(quantity, *means, difference=difference, tolerance=TOLERANCE))
    tolerance = LOSS_TOLERANCE[dtype] * max(1.0, abs(first))
    return [*rows, Comparison("loss of the first mini-batch", first, loss, abs(first - loss), tolerance)]


def _column(batch: DataProto, name: str) -> Tensor:
    return batch.batch.get(name, torch.full(batch.batch["responses"].shape, torch.nan))


def _on(batch: DataProto, values_BR: Tensor) -> Tensor:
    """Values [N] of the trained tokens."""
    return values_BR[batch.batch["response_mask"] > 0]


def describe(batch: DataProto, loss: float) -> dict[str, float]:
    """Statistics of the advantages of trained tokens, and the loss, by name."""
    advantages_BR, mask_BR = batch.batch["advantages"], batch.batch["response_mask"]
    advantage_N = _on(batch, advantages_BR)
    some = advantage_N if len(advantage_N) else torch.zeros(1)
    return {
        "advantages, mean": some.mean().item(),
        "advantages, standard deviation": some.std(unbiased=False).item(),
        "advantages, minimum": some.min().item(),
        "advantages, maximum": some.max().item(),
        "responses with advantage 0": ((advantages_BR * mask_BR) == 0).all(-1).float().mean().item(),
        "loss of the first mini-batch": loss,
    }


def correlation(trained: DataProto, other: DataProto) -> float:
    """Correlation of the advantages of tokens trained in both batches; NaN if either is constant."""
    both_BR = (trained.batch["response_mask"] > 0) & (other.batch["response_mask"] > 0)
    pair_2N = torch.stack([batch.batch["advantages"][both_BR] for batch in (trained, other)])
    varies = pair_2N.shape[1] > 1 and bool((pair_2N.std(-1) > 0).all())
    return torch.corrcoef(pair_2N)[0, 1].item() if varies else float("nan")
