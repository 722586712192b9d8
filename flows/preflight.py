"""Checks before a run starts, so that a user error costs only seconds."""

import os
import threading
from pathlib import Path
from typing import Any

from flows.server.prefect_api import api_problem
from rl_core.algorithms.advantages import ESTIMATORS
from rl_core.algorithms.policy_losses import POLICY_LOSSES
from rl_core.cluster.resources import cluster_problem, resolve_device
from rl_core.config.compose import Composed
from rl_core.config.schema import AgentConfig, RunConfig
from rl_core.console import Console
from rl_core.data.dataset import check_tokenizer
from rl_core.data.sources import load_source
from rl_core.errors import InputError, TransientError
from rl_core.models.load import (
    check_model_folder,
    check_sequence_parallel,
    check_shape,
    empty_causal_lm,
    load_tokenizer,
    stop_tokens,
)
from rl_core.models.lora import add_adapters
from rl_core.models.parity import check_parity
from rl_core.models.template import change_template
from rl_core.rewards.model import check_reward_model
from rl_core.rewards.row_check import try_first_rows
from rl_core.rewards.runner import check_scorers
from rl_core.rollout.agent.responders import chat_template
from rl_core.rollout.agent.tool_runner import tool_schemas
from rl_core.rollout.environment import resolve_environment
from rl_core.runtime.watchdog import Watchdog
from rl_core.storage.store import Store
from tasks.runs.hang_report import own_frames
from tasks.runs.run import runs_root
from tasks.tracking.tracker import check_tracking, default_tracking_uri


def check_home(home: Path) -> None:
    """Raises InputError if the home folder is not writable."""
    try:
        Store(str(home)).check_writable()
    except InputError as error:
        raise InputError(
            expected="a writable home folder",
            seen=error.seen,
            where=f"ROLLFORWARD_HOME={home}",
            fix="set ROLLFORWARD_HOME=FOLDER",
        ) from error


def check_cluster() -> None:
    """Raises InputError if no cluster answers at RAY_ADDRESS."""
    address = os.environ.get("RAY_ADDRESS", "")
    if problem := cluster_problem(address):
        raise InputError(
            expected="a reachable Ray cluster",
            seen=problem,
            where=f"RAY_ADDRESS={address}",
            fix="start it (`ray start --head --port 6379`), correct the address, or unset it to start a local Ray",
        )


def check_prefect() -> None:
    """Raises InputError if no server answers at PREFECT_API_URL, because the flow could not start."""
    url = os.environ.get("PREFECT_API_URL", "")
    if url and (problem := api_problem(url)):
        raise InputError(
            expected="a reachable Prefect server",
            seen=problem,
            where=f"PREFECT_API_URL={url}",
            fix="start it (`rollforward up`), correct the address, or unset it to start a temporary server",
        )


def check_agent(agent: AgentConfig) -> list[dict[str, Any]]:
    """Schemas of all tools; raises InputError if a tool, an MCP server or the environment is missing."""
    if agent.environment:
        resolve_environment(agent.environment)
    try:
        return tool_schemas(agent)
    except TransientError as error:
        raise InputError(
            expected="MCP servers that list their tools",
            seen=str(error),
            where="agent.mcp_servers",
            fix="start the server and check its address, or run its command by hand to see its output",
        ) from error


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


def watch_for_hang(config: RunConfig) -> Watchdog:
    """A watchdog that kills this process if storage or a server never answers before the run starts."""

    def on_stall(silent_s: float) -> None:
        frames = own_frames(threading.main_thread().ident or 0)
        waited = f"no progress for {silent_s:.0f} s (trainer.stall_timeout_s) before the run started"
        Console().failure(TransientError(f"{waited}: this process hangs in {frames}"))

    return Watchdog(config.trainer.silence_s, on_stall)


def preflight(composed: Composed, home: Path, resuming: bool = False) -> None:
    """Raises InputError for the first unusable part: home, storage, MLflow, Ray, tools, environment, model, scorers,
    data sources, functions, device; the user's scorers score one row. With `resuming` an outage of storage, MLflow or
    Ray is accepted (the stages wait for it), and no row is read."""
    config = composed.config
    check_home(home)
    if config.storage.root and not resuming:
        runs_root(config.storage, home).check_writable()
    check_tracking(config.tracking.uri or default_tracking_uri(home), resuming)
    if not resuming:
        check_cluster()
    schemas = check_agent(config.agent)
    if config.model.path != "tiny":
        folder = check_model_folder(config.model.path)
        tokenizer = load_tokenizer(folder)
        change_template(tokenizer, config.model.chat_template, config.data.chat_template_kwargs)
        check_tokenizer(tokenizer, config.model.path)
        chat_template(tokenizer, schemas, config.agent, stop_tokens(folder))
        check_shape(folder, config.max_length, config.rollout.tensor_parallel_size)
        model = empty_causal_lm(folder)
        check_sequence_parallel(model, config.fsdp.sequence_parallel_size)
        if config.model.lora.rank:
            add_adapters(model, config.model.lora)
        check_parity(str(folder), config.max_length, home / "parity")
    if config.reward.model.path:
        check_reward_model(config.reward.model.path)
    check_scorers(config.reward, {})
    if not resuming and config.algorithm.overlong_buffer > config.data.max_response_length:
        raise InputError(
            expected=f"at most data.max_response_length={config.data.max_response_length}, usually a quarter of it",
            seen=f"{config.algorithm.overlong_buffer}, so every response would be penalised as overlong",
            where="algorithm.overlong_buffer",
            fix="reduce algorithm.overlong_buffer, or set it to 0 to disable the penalty",
        )
    for source in config.data.sources:
        load_source(source.source)
    if not resuming:
        try_first_rows(config.reward, config.data, config.trainer.seed)
    ESTIMATORS.resolve(config.algorithm.estimator)
    POLICY_LOSSES.resolve(config.actor.policy_loss)
    check_engines(config)
