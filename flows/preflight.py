"""Checks before a run starts, so that a user error costs only seconds."""

from pathlib import Path
from typing import Any

from flows.first_checks import check_rows, first_checks, tokenizer_of
from rl_core.algorithms.advantages import ESTIMATORS
from rl_core.algorithms.policy_losses import POLICY_LOSSES
from rl_core.cluster.resources import resolve_device
from rl_core.config.compose import Composed
from rl_core.config.schema import RunConfig
from rl_core.errors import InputError
from rl_core.models.load import (
    check_model_folder,
    check_sequence_parallel,
    check_shape,
    empty_causal_lm,
    stop_tokens,
)
from rl_core.models.lora import add_adapters
from rl_core.rewards.model import check_reward_model
from rl_core.rollout.agent.responders import chat_template


def check_engines(config: RunConfig) -> None:
    """Raises InputError if CUDA is configured but missing, or for several tensor-parallel engines on the CPUs of one
    machine: vLLM gives their shared memory the same name."""
    device, size = resolve_device(config.trainer), config.rollout.tensor_parallel_size
    ranks = config.rollout.ranks_per_node or config.trainer.ranks_per_node
    if device == "cpu" and 1 < size < ranks:
        raise InputError(
            expected="at most one tensor-parallel engine per machine on CPUs",
            seen=f"{ranks} ranks in engines of {size}",
            where=f"rollout.tensor_parallel_size={size}",
            fix=f"set rollout.tensor_parallel_size={ranks}, or 1",
        )


def preflight(composed: Composed, home: Path, resuming: bool = False) -> None:
    """Raises InputError for the first unusable part of those of `first_checks`, rows, and those of `check_parts`.

    With `resuming` an outage of storage, MLflow or Ray is accepted (the stages wait for it), and no row is read.
    """
    schemas = first_checks(composed.config, home, resuming)
    if not resuming:
        check_rows(composed.config, schemas)
    check_parts(composed.config, schemas, home)


def check_parts(config: RunConfig, schemas: list[dict[str, Any]], home: Path) -> None:
    """Raises InputError for the first unusable part: model, chat template, reward model, functions, device.

    `schemas` are those of the run's tools; `home` remembers families that passed `check_parity`.
    """
    if config.model.path != "tiny":
        from rl_core.models.parity import check_parity  # imports transformers' model code, which takes seconds
        from rl_core.models.weights import check_weights

        folder, tokenizer = check_model_folder(config.model.path), tokenizer_of(config)
        chat_template(tokenizer, schemas, config.agent, stop_tokens(folder))
        check_shape(folder, config.max_length, config.rollout.tensor_parallel_size)
        model = empty_causal_lm(folder)
        check_weights(model, folder)
        check_sequence_parallel(model, config.fsdp.sequence_parallel_size)
        if config.model.lora.rank:
            add_adapters(model, config.model.lora)
        check_parity(str(folder), config.max_length, home / "parity")
    if config.reward.model.path:
        check_reward_model(config.reward.model.path)
    ESTIMATORS.resolve(config.algorithm.estimator)
    POLICY_LOSSES.resolve(config.actor.policy_loss)
    check_engines(config)
