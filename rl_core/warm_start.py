"""The supervised start: cross-entropy on the training rows' reference answers, before reinforcement."""

from collections.abc import Callable
from statistics import fmean

from transformers import PreTrainedTokenizerBase

from rl_core.cluster.roles import Roles
from rl_core.config.schema import RunConfig
from rl_core.data.dataset import RLHFDataset
from rl_core.data.loader import StatefulLoader
from rl_core.data.protocol import DataProto
from rl_core.data.sources import load_source
from rl_core.errors import InputError
from rl_core.rollout.trajectory import Trajectory, to_batch
from rl_core.storage import Store

FOLDER = "warm_start"
# Steps whose mean loss decides about an early end; single batches are too noisy.
RECENT = 10


def warm_start(
    config: RunConfig,
    rows: RLHFDataset,
    roles: Roles,
    tokenizer: PreTrainedTokenizerBase,
    store: Store,
    on_step: Callable[[int, float], None],
) -> None:
    """Trains the actor, which `Roles.init_warm_start` has loaded, and commits the result as folder `warm_start`.

    `on_step` gets the number of the step and its loss.
    """
    loader = StatefulLoader(len(rows), config.warm_start.batch_size, config.trainer.seed, "")
    reference_response = load_source(config.data.source).reference_response
    losses: list[float] = []
    for step in range(1, config.warm_start.steps + 1):
        chosen = [rows[i] for i in loader.next()]
        answers = [reference_response(row) for row in chosen]
        batch = supervised_batch([row["prompt_ids"] for row in chosen], answers, tokenizer, config)
        losses.append(roles.actor.update_supervised(batch)["loss"])
        on_step(step, losses[-1])
        if fmean(losses[-RECENT:]) <= config.warm_start.stop_loss:
            break
    roles.actor.export(store, FOLDER)
    store.commit_folder(FOLDER, {"steps": len(losses), "loss": losses[-1]})


def supervised_batch(
    prompts: list[list[int]], answers: list[str], tokenizer: PreTrainedTokenizerBase, config: RunConfig
) -> DataProto:
    """Prompts with their reference answers and the end token as a batch; InputError for an answer that is too long."""
    longest = config.data.max_response_length
    trajectories = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = tokenizer.encode(answer, add_special_tokens=False) + [tokenizer.eos_token_id]
        if len(ids) > longest:
            raise InputError(
                f"reference answers of at most {longest} tokens for the warm start",
                f"one of {len(ids)} tokens: {answer[:60]!r}…",
                "data.max_response_length",
                f"set data.max_response_length={len(ids)} or warm_start.steps=0",
            )
        trajectories.append(Trajectory(prompt, 0, response_ids=ids, response_mask=[1] * len(ids)))
    return to_batch(trajectories, longest)
