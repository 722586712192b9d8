"""What is looked at before anything starts, so that a person's mistake costs seconds."""

import os
import threading
from pathlib import Path
from typing import Any

from flows.server.services import api_problem
from rl_core.algorithms.advantages import ESTIMATORS
from rl_core.algorithms.policy_losses import POLICY_LOSSES
from rl_core.cluster.resources import cluster_problem, resolve_device
from rl_core.config.compose import Composed
from rl_core.config.schema import AgentConfig, RunConfig
from rl_core.console import Console
from rl_core.data.dataset import check_tokenizer
from rl_core.data.sources import load_source
from rl_core.errors import InputError, TransientError
from rl_core.models.load import check_model_folder, check_shape, empty_causal_lm, load_tokenizer, stop_tokens
from rl_core.models.lora import add_adapters
from rl_core.rewards.model import check_reward_model
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
    """InputError when the home folder cannot be written."""
    try:
        Store(str(home)).check_writable()
    except InputError as error:
        raise InputError(
            "a home folder that can be written", error.seen, f"ROLLFORWARD_HOME={home}", "set ROLLFORWARD_HOME=FOLDER"
        ) from error


def check_cluster() -> None:
    """InputError when nothing answers at RAY_ADDRESS."""
    address = os.environ.get("RAY_ADDRESS", "")
    if problem := cluster_problem(address):
        fix = "start it (`ray start --head --port 6379`) or correct the address; unset, a run starts a Ray of its own"
        raise InputError("a Ray cluster that answers", problem, f"RAY_ADDRESS={address}", fix)


def check_prefect() -> None:
    """InputError when nothing answers at PREFECT_API_URL, without which a flow cannot begin."""
    url = os.environ.get("PREFECT_API_URL", "")
    if url and (problem := api_problem(url)):
        fix = "start it (`rollforward up`) or correct the address; unset, a run starts a server of its own"
        raise InputError("a Prefect server that answers", problem, f"PREFECT_API_URL={url}", fix)


def check_agent(agent: AgentConfig) -> list[dict[str, Any]]:
    """Schemas of all tools; InputError when a tool, an MCP server or the environment is not there."""
    if agent.environment:
        resolve_environment(agent.environment)
    try:
        return tool_schemas(agent)
    except TransientError as error:
        fix = "start the server and check its address, or run its command by hand to see what it says"
        raise InputError("MCP servers that list their tools", str(error), "agent.mcp_servers", fix) from error


def check_engines(config: RunConfig) -> None:
    """InputError when CUDA is asked for and there is none, and when a machine would have several engines of several
    ranks on its CPUs: vLLM gives their shared memory one name."""
    device, size = resolve_device(config.trainer), config.rollout.tensor_parallel_size
    ranks = config.rollout.ranks_per_node or config.trainer.ranks_per_node
    if device == "cpu" and 1 < size < ranks:
        raise InputError(
            "one tensor-parallel engine a machine on CPUs",
            f"{ranks} ranks in engines of {size}",
            f"rollout.tensor_parallel_size={size}",
            f"set rollout.tensor_parallel_size={ranks}, or 1",
        )


def watched(config: RunConfig) -> Watchdog:
    """What ends this process when storage or a server that is looked at never answers."""

    def on_stall(silent_s: float) -> None:
        frames = own_frames(threading.main_thread().ident or 0)
        message = f"no progress for {silent_s:.0f} s (trainer.stall_timeout_s) before the run, in {frames}"
        Console().failure(TransientError(message))

    return Watchdog(config.trainer.silence_s, on_stall)


def preflight(composed: Composed, home: Path, resuming: bool = False) -> None:
    """InputError for the first thing that the run could not work with: home, storage, MLflow, tools, environment,
    model, scorers, source, device. With `resuming` there is a run, which a storage, an MLflow or a Ray that is down
    shall not stop: what needs it waits for it."""
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
        check_tokenizer(tokenizer, config.model.path)
        chat_template(tokenizer, schemas, config.agent, stop_tokens(folder))
        check_shape(folder, config.max_length, config.rollout.tensor_parallel_size)
        if config.model.lora.rank:
            add_adapters(empty_causal_lm(config.model.path), config.model.lora)
    if config.reward.model.path:
        check_reward_model(config.reward.model.path)
    check_scorers(config.reward, {})
    if not resuming and config.algorithm.overlong_buffer > config.data.max_response_length:
        raise InputError(
            f"a part of data.max_response_length={config.data.max_response_length}, such as a quarter",
            f"{config.algorithm.overlong_buffer}, longer than any response: each would be too long",
            "algorithm.overlong_buffer",
            "set algorithm.overlong_buffer, or 0 for none",
        )
    for source in config.data.sources:
        load_source(source.source)
    ESTIMATORS.resolve(config.algorithm.estimator)
    POLICY_LOSSES.resolve(config.actor.policy_loss)
    check_engines(config)
