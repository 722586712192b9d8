"""What is looked at before anything starts, so that a person's mistake costs seconds."""

from pathlib import Path

from rl_core.algorithms.advantages import ESTIMATORS
from rl_core.algorithms.policy_losses import POLICY_LOSSES
from rl_core.cluster.resources import resolve_device
from rl_core.config.compose import Composed
from rl_core.data.dataset import check_tokenizer
from rl_core.data.sources import load_source
from rl_core.errors import InputError
from rl_core.models.load import check_model_folder, empty_causal_lm, load_tokenizer
from rl_core.models.lora import add_adapters
from rl_core.rewards.model import check_reward_model
from rl_core.rollout.environment import resolve_environment
from rl_core.rollout.tools import resolve_tools
from rl_core.storage import Store
from tasks.tracking import check_tracking, default_tracking_uri


def check_home(home: Path) -> None:
    """InputError when the home folder cannot be written."""
    try:
        Store(str(home)).check_writable()
    except InputError as error:
        raise InputError(
            "a home folder that can be written", error.seen, f"ROLLFORWARD_HOME={home}", "set ROLLFORWARD_HOME=FOLDER"
        ) from error


def preflight(composed: Composed, home: Path) -> None:
    """InputError for the first thing that the run could not work with: home, storage, MLflow, model, source, tools,
    environment, device."""
    config = composed.config
    check_home(home)
    if config.storage.root:
        Store(config.storage.root).check_writable()
    check_tracking(config.tracking.uri or default_tracking_uri(home))
    if config.model.path != "tiny":
        check_tokenizer(load_tokenizer(check_model_folder(config.model.path)), config.model.path)
        if config.model.lora.rank:
            add_adapters(empty_causal_lm(config.model.path), config.model.lora)
    if config.reward.model.path:
        check_reward_model(config.reward.model.path)
    load_source(config.data.source)
    ESTIMATORS.resolve(config.algorithm.estimator)
    POLICY_LOSSES.resolve(config.actor.policy_loss)
    resolve_tools(config.agent.tools)
    if config.agent.environment:
        resolve_environment(config.agent.environment)
    resolve_device(config.trainer)
