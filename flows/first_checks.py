"""Checks before a run starts that need neither torch nor Ray: most mistakes are refused within two seconds."""

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.server.prefect_api import api_problem
from rl_core.cluster.address import cluster_problem
from rl_core.config.schema import AgentConfig, RunConfig
from rl_core.console import Console
from rl_core.data.check import check_data
from rl_core.data.dataset import check_tokenizer
from rl_core.data.sources import load_source
from rl_core.errors import InputError, TransientError
from rl_core.rewards.row_check import RowCheck
from rl_core.rewards.runner import check_scorers
from rl_core.rollout.agent.tool_runner import tool_schemas
from rl_core.rollout.agent.toolbox import row_schemas
from rl_core.rollout.environment import resolve_environment
from rl_core.runtime.watchdog import Watchdog, progress
from rl_core.storage.store import Store
from tasks.runs.hang_report import own_frames
from tasks.runs.run import runs_root
from tasks.tracking.tracker import check_tracking, default_tracking_uri

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_ROWS = 10_000
"""Rows that are checked before a run is made; the stage `prepare data` checks all."""


def watch_for_hang(config: RunConfig) -> Watchdog:
    """A watchdog that kills this process if storage or a server never answers before the run starts."""

    def on_stall(silent_s: float) -> None:
        frames = own_frames(threading.main_thread().ident or 0)
        waited = f"no progress for {silent_s:.0f} s (trainer.stall_timeout_s) before the run started"
        Console().failure(TransientError(f"{waited}: this process hangs in {frames}"))

    return Watchdog(config.trainer.silence_s, on_stall)


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


def first_checks(config: RunConfig, home: Path, resuming: bool = False) -> list[dict[str, Any]]:
    """Schemas of all tools; raises InputError for the first unusable part: home, the model's folder, storage, MLflow,
    Ray, tools, environment, scorers, data sources. With `resuming` an outage of storage, MLflow or Ray is accepted."""
    check_home(home)
    if config.model.path != "tiny" and not Path(config.model.path).expanduser().is_dir():
        raise InputError(  # its files are checked later: that takes seconds
            expected="a folder with a Hugging Face checkpoint",
            seen="no such folder",
            where=f"model.path={config.model.path}",
            fix="correct the path, or set model.path=tiny",
        )
    if config.storage.root and not resuming:
        runs_root(config.storage, home).check_writable()
    check_tracking(config.tracking.uri or default_tracking_uri(home), resuming)
    if not resuming:
        check_cluster()
    schemas = check_agent(config.agent)
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
    return schemas


def tokenizer_of(config: RunConfig) -> "PreTrainedTokenizerBase":
    """The tokenizer of `model.path`, without a model; raises InputError if it cannot be used."""
    if config.model.path == "tiny":
        from rl_core.models.tokenizer import build_tokenizer

        return build_tokenizer()
    from rl_core.models.load import check_model_folder, load_tokenizer  # takes seconds
    from rl_core.models.template import change_template

    tokenizer = load_tokenizer(check_model_folder(config.model.path))
    change_template(tokenizer, config.model.chat_template, config.data.chat_template_kwargs)
    check_tokenizer(tokenizer, config.model.path)
    return tokenizer


def check_rows(config: RunConfig, schemas: list[dict[str, Any]]) -> None:
    """Raises InputError for the first problem of the rows that would stop the run; the user's scorers score one row.

    At most `MOST_ROWS` rows are read. If the storage of the data fails, the stage `prepare data` checks them alone: it
    retries. `schemas` are those of the run's tools.
    """
    check_row, tokenizer = RowCheck(config.reward), tokenizer_of(config)
    try:
        report = check_data(
            config.data,
            config.trainer.seed,
            tokenizer,
            row_schemas(schemas),
            lambda split, row, tokens: None,
            check_row=check_row,
            at_end=check_row.try_scorers,
            on_rows=lambda count: progress(),
            max_rows=MOST_ROWS,
        )
    except TransientError:
        return
    if report.stops:
        raise report.stops[0].error
