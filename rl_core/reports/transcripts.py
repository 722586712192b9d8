"""Trajectories of a committed step as text: turns, calls and rewards."""

import json
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from rl_core.trainer.reward_columns import NAMED
from rl_core.trainer.rollout_file import rollout_table

NEEDED = (
    "uid", "row", "prompt_ids", "responses", "response_mask", "version", "old_log_probs",
    "advantages", "token_level_scores", "token_level_shaped", "token_level_rewards", "turn_reward", "scored",
    "stop_reason", "status", "detail", "calls",
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One turn of the policy: the text it read since its previous turn, the text it sampled, and its calls.

    `read_tokens` and `tokens` are counts. `log_prob` is the mean in nats under the actor before its update, None if the
    turn has no tokens. `advantage` is the mean over trained tokens, None without any.
    """

    read: str
    read_tokens: int
    text: str
    tokens: int
    log_prob: float | None
    versions: list[int]
    reward: float
    advantage: float | None
    calls: list[dict[str, Any]]


@dataclass(frozen=True)
class Transcript:
    """A trajectory: row `position` of a step's rollouts, in response to row `row` of the data.

    `answer` is the last turn, the text that scorers receive; `score` is None if the response was not scored. `rewards`
    are sums over all tokens.
    """

    position: int
    uid: str
    row: int
    prompt: str
    answer: str
    score: float | None
    rewards: dict[str, float]
    advantage: float | None
    stop_reason: str
    status: str
    detail: str
    turns: list[Turn]


def transcripts(data: bytes, count: int, tokenizer: PreTrainedTokenizerBase, where: str) -> list[Transcript]:
    """Up to `count` trajectories of a step's parquet file, ordered from the best score to the worst.

    Raises InputError if the file is damaged or lacks a column.
    """
    table = rollout_table(data, NEEDED, where)
    positions = spread(table, count)
    rows = table.take(positions).to_pylist()
    return [transcript(position, row, tokenizer) for position, row in zip(positions, rows, strict=True)]


def spread(table: pa.Table, count: int) -> list[int]:
    """Positions of the best, the worst, and evenly spaced scores between them; unscored rows rank last."""
    score = [sum(row) for row in table["token_level_scores"].to_pylist()]
    scored = table["scored"].to_pylist()
    order = sorted(range(len(score)), key=lambda position: (not scored[position], -score[position], position))
    if count >= len(order):
        return order
    return [order[i * (len(order) - 1) // max(count - 1, 1)] for i in range(count)]


def transcript(position: int, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Transcript:
    """Decodes a row of a step's parquet file; special tokens are kept except in `answer`."""
    rewards = {name: float(sum(row[f"token_level_{name}"])) for name in ("scores", "shaped", "rewards")}
    named = {name.removeprefix(NAMED): value for name, value in row.items() if name.startswith(NAMED)}
    last_turn = slice(*_sampled_spans(row["version"])[-1]) if row["version"] else slice(0)
    return Transcript(
        position=position,
        uid=row["uid"],
        row=row["row"],
        prompt=str(tokenizer.decode(row["prompt_ids"])),
        answer=str(tokenizer.decode(row["responses"][last_turn], skip_special_tokens=True)),
        score=rewards["scores"] if row["scored"] else None,
        rewards={**rewards, "turns": row["turn_reward"], **named},
        advantage=_trained_mean(row, slice(None)),
        stop_reason=row["stop_reason"],
        status=row["status"],
        detail=row["detail"],
        turns=_turns(row, tokenizer),
    )


def _turns(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[Turn]:
    calls, last_end = json.loads(row["calls"]), 0
    turns: list[Turn] = []
    for start, end in _sampled_spans(row["version"]):
        span = slice(start, end)
        read = row["responses"][last_end:start] if turns else row["prompt_ids"]
        last_end, log_probs = end, row["old_log_probs"][span]
        turns.append(
            Turn(
                read=str(tokenizer.decode(read)),
                read_tokens=len(read),
                text=str(tokenizer.decode(row["responses"][span])),
                tokens=end - start,
                log_prob=sum(log_probs) / len(log_probs) if log_probs else None,
                versions=sorted(set(row["version"][span])),
                reward=float(sum(row["token_level_rewards"][span])),
                advantage=_trained_mean(row, span),
                calls=[call for call in calls if call["turn"] == len(turns) + 1],
            )
        )
    return turns


def _sampled_spans(version: list[int]) -> list[tuple[int, int]]:
    """Start and end of each turn's tokens; a last turn that failed before its first token is empty.

    Uses the weights version because the mask is 0 on trajectories that are not trained.
    """
    spans, end = [], 0
    for sampled, group in groupby(version, key=lambda each: each >= 0):
        start, end = end, end + len(list(group))
        if sampled:
            spans.append((start, end))
    return spans if not version or version[-1] >= 0 else [*spans, (end, end)]


def _trained_mean(row: dict[str, Any], span: slice) -> float | None:
    pairs = zip(row["advantages"][span], row["response_mask"][span], strict=True)
    values = [value for value, mask in pairs if mask]
    return sum(values) / len(values) if values else None
