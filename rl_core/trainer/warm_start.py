"""Warm start: supervised training on the rows' reference answers before reinforcement learning."""

import itertools
import math
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
from rl_core.rollout.agent.chat import ChatTemplate, Message
from rl_core.rollout.trajectory import Trajectory, to_batch
from rl_core.storage import run_files
from rl_core.storage.store import Store

RECENT = 10
"""Steps whose mean loss is compared with `warm_start.stop_loss`; single batches are too noisy."""


def warm_start(
    config: RunConfig,
    rows: RLHFDataset,
    roles: Roles,
    tokenizer: PreTrainedTokenizerBase,
    store: Store,
    chat: ChatTemplate,
    on_step: Callable[[int, float], None],
) -> None:
    """Trains the actor loaded by `Roles.init_warm_start`, and commits the result as folder `warm_start`.

    `on_step` receives the step number and its loss. Raises InputError if a reference answer is too long.
    """
    weights = [source.weight for source in config.data.sources]
    loader = StatefulLoader(rows.sizes, config.warm_start.batch_size, config.trainer.seed, "", weights)
    sources = [load_source(source.source) for source in config.data.sources]
    losses: list[float] = []
    for step in range(1, config.warm_start.steps + 1):
        indices = loader.next()
        chosen = [rows[i] for i in indices]
        answers = [sources[rows.source_of(i)].reference_response(row) for i, row in zip(indices, chosen, strict=True)]
        batch = supervised_batch([row["prompt_ids"] for row in chosen], answers, tokenizer, chat, config)
        losses.append(roles.actor.update_supervised(batch).get("loss", math.nan))  # NaN where the update was skipped
        on_step(step, losses[-1])
        if fmean(losses[-RECENT:]) <= config.warm_start.stop_loss:
            break
    files = roles.actor.export(store, run_files.WARM_START)[0]
    loss = losses[-1] if math.isfinite(losses[-1]) else None
    store.commit_folder(run_files.WARM_START, {"steps": len(losses), "loss": loss}, files)


def supervised_batch(
    prompts: list[list[int]],
    answers: list[str | list[Message]],
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatTemplate,
    config: RunConfig,
) -> DataProto:
    """Prompts with their reference answers as a batch; messages of other roles than `assistant` have mask 0.

    Raises InputError if an answer exceeds `data.max_response_length` tokens.
    """
    longest = config.data.max_response_length
    trajectories = []
    for prompt, answer in zip(prompts, answers, strict=True):
        turns = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
        trajectories.append(conversation(prompt, turns, tokenizer, chat))
        length = len(trajectories[-1].response_ids)
        if length > longest:
            raise InputError(
                f"reference answers of at most {longest} tokens for the warm start",
                f"an answer of {length} tokens: {turns[0]['content'][:60]!r}…",
                "data.max_response_length",
                f"set data.max_response_length={length} or warm_start.steps=0",
            )
    return to_batch(trajectories, longest)


def conversation(
    prompt: list[int], messages: list[Message], tokenizer: PreTrainedTokenizerBase, chat: ChatTemplate
) -> Trajectory:
    """A conversation as a trajectory: assistant messages, each with its end token, count as sampled by the policy."""
    trajectory = Trajectory(prompt, 0)
    for by_policy, group in itertools.groupby(messages, lambda message: message["role"] == "assistant"):
        if by_policy:
            for message in group:
                ids = [*tokenizer.encode(message["content"], add_special_tokens=False), tokenizer.eos_token_id]
                trajectory.response_ids += ids
                trajectory.response_mask += [1] * len(ids)
        else:
            trajectory.append(chat.appended_ids(list(group), trajectory.response_ids[-1]))
    return trajectory
