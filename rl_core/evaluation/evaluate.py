"""Evaluation of a policy on the held-out rows, greedy and sampled, with the rollout engine.

Results are cached by weights, rows and settings.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rl_core.cluster.roles import Roles
from rl_core.config.compose import identity
from rl_core.config.schema import RunConfig
from rl_core.data.boxed import last_box
from rl_core.data.dataset import RLHFDataset
from rl_core.data.protocol import DataProto
from rl_core.data.rows import Row, canonical
from rl_core.errors import TransientError
from rl_core.evaluation.statistics import bootstrap_interval, majority_at_k, pass_at_k
from rl_core.storage.manifest import Json
from rl_core.storage.store import Store
from rl_core.trainer.batch import response_seeds
from rl_core.trainer.reward_columns import answer_texts, check_failed, collect_results

SAMPLES_SHOWN = 20
TURNS_KEPT = 8
"""Number of greedy first turns whose tokens are stored for the reload test."""
RIGHT = 0.5
"""Minimum score of a response that counts as right in pass@k."""
LEVEL = 0.95
"""Confidence level of the intervals."""
METRICS = ("greedy", "sampled", "pass_at_k", "maj_at_k")
_SCORING = ("reward.", "agent.", "rollout.top_", "model.dtype", "evaluation.refusal_pattern")
"""Prefixes of settings outside `evaluation` that affect scores."""


@dataclass(frozen=True)
class _Responses:
    """B = rows × n responses, grouped by row."""

    score_B: torch.Tensor
    texts: list[str]
    batch: DataProto

    def column(self, name: str) -> list[Any]:
        tensors, others = self.batch.batch, self.batch.non_tensor_batch
        return list(tensors[name].tolist() if name in tensors else others[name])


def evaluate(config: RunConfig, rows: RLHFDataset, roles: Roles, tokenizer: PreTrainedTokenizerBase) -> Json:
    """Evaluates the policy on the held-out rows; returns JSON (docs/promotion.md lists the keys).

    Computes the greedy score and, from `evaluation.sampled_n` responses per prompt, avg@k, pass@k and maj@k, each with
    an interval and by data source. As in training, scores include the rewards of tools and environment. A failed
    conversation scores 0. Seeds depend on the run's seed only, so two models are compared on the same draws.

    Raises TransientError if the share of failed conversations exceeds `reward.max_failed_share` or a response could not
    be scored, InputError if that is a mistake of its scorer.
    """
    n, chosen = config.evaluation.sampled_n, [rows[i] for i in range(len(rows))]
    greedy = _responses(config, chosen, roles, tokenizer, 0.0, 1)
    sampled = _responses(config, chosen, roles, tokenizer, config.evaluation.temperature, n)
    refusal = re.compile(config.evaluation.refusal_pattern)
    per_row = [
        {
            "index": i,
            "source": row["data_source"],
            "greedy": score,
            "sampled": sampled.score_B[i * n : (i + 1) * n].tolist(),
            "maj_at_k": majority_at_k(
                [final_answer(text) for text in sampled.texts[i * n : (i + 1) * n]],
                sampled.score_B[i * n : (i + 1) * n].tolist(),
            ),
            "length": length,
            "ended": stop_reason == "stop",
            "refused": refusal.search(text) is not None,
            "failed": status == "failed",
        }
        for i, (row, score, text, length, stop_reason, status) in enumerate(
            zip(
                chosen,
                greedy.score_B.tolist(),
                greedy.texts,
                greedy.column("response_length"),
                greedy.column("stop_reason"),
                greedy.column("status"),
                strict=True,
            )
        )
    ]
    return {
        **summary(per_row, config.trainer.seed),
        "per_row": per_row,
        "samples": _samples(chosen, greedy),
        "first_turns": _first_turns(greedy),
    }


def summary(per_row: Sequence[Json], seed: int) -> Json:
    """Means, intervals, scores by source and guards of an evaluation's rows; `seed` seeds the resampling."""
    columns = {name: [_value(row, name) for row in per_row] for name in METRICS}
    sources = {row["source"]: [row] for row in per_row}
    for source in sources:
        sources[source] = [row for row in per_row if row["source"] == source]
    return {
        "rows": len(per_row),
        **{name: float(np.mean(values)) for name, values in columns.items()},
        "intervals": {name: list(bootstrap_interval(values, LEVEL, seed)) for name, values in columns.items()},
        "sources": {
            source: {name: float(np.mean([_value(row, name) for row in its])) for name in METRICS} | {"rows": len(its)}
            for source, its in sources.items()
        },
        "guards": {
            "length": float(np.mean([row["length"] for row in per_row])),
            "format": float(np.mean([row["ended"] for row in per_row])),
            "refusal": float(np.mean([row["refused"] for row in per_row])),
            "failed": float(np.mean([row["failed"] for row in per_row])),
        },
    }


def final_answer(text: str) -> str:
    """The final answer of a response: its last box, or else its last line. maj@k counts responses by it."""
    box = last_box(text)
    return box.strip() if box is not None else (text.strip().splitlines() or [""])[-1].strip()


def settings_of(config: RunConfig) -> Json:
    """What a score depends on besides weights and rows: sampling settings, and a hash of the scoring settings."""
    scoring = {key: value for key, value in identity(config).items() if key.startswith(_SCORING)}
    return {
        "sampled_n": config.evaluation.sampled_n,
        "temperature": config.evaluation.temperature,
        "max_response_length": config.data.max_response_length,
        "seed": config.trainer.seed,
        "scoring": _digest(scoring),
    }


def rows_hash(rows: Sequence[Row]) -> str:
    """sha256 (hexadecimal) of the rows; depends on their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(canonical(row).encode() + b"\n")
    return digest.hexdigest()


def cached(root: Store, weights: str, data: str, settings: Json, make: Callable[[], Json]) -> Json:
    """Returns the cached evaluation of these weights, rows and settings; calls `make` and stores the result if there is
    none.

    `root` is the storage root shared by all runs; the file is `evaluations/<weights>-<data>-<settings>.json`.
    """
    name = f"evaluations/{weights[:16]}-{data[:16]}-{_digest(settings)[:8]}.json"
    if not root.exists(name):
        root.write_json(name, {**make(), "weights": weights, "data": data, "settings": settings})
    result: Json = root.read_json(name)
    return result


def _digest(value: Json) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _value(row: Json, metric: str) -> float:
    """Value of a metric for one row."""
    sampled = row["sampled"]
    if metric == "sampled":
        return float(np.mean(sampled))
    if metric == "pass_at_k":
        return pass_at_k(len(sampled), sum(score >= RIGHT for score in sampled), len(sampled))
    return float(row[metric])


def _samples(rows: Sequence[Row], greedy: _Responses) -> list[Json]:
    return [
        {
            "prompt": row["prompt"][-1]["content"],
            "ground_truth": row["reward_model"]["ground_truth"],
            "answer": text,
            "score": score,
        }
        for row, text, score in list(zip(rows, greedy.texts, greedy.score_B.tolist(), strict=True))[:SAMPLES_SHOWN]
    ]


def _first_turns(greedy: _Responses) -> list[Json]:
    """Token ids of the first prompts and of the policy's first turn."""
    tensors = greedy.batch[:TURNS_KEPT].batch
    first_turn_B = tensors["response_mask"].cumprod(-1).sum(-1).int().tolist()
    return [
        # The prompt as used in the rollout: an environment may have added messages before the first turn.
        {"prompt_ids": prompt[:length].tolist(), "response_ids": ids[:first].tolist()}
        for prompt, length, ids, first in zip(
            tensors["prompts"], tensors["prompt_length"].tolist(), tensors["responses"], first_turn_B, strict=True
        )
    ]


def _responses(
    config: RunConfig,
    chosen: list[Row],
    roles: Roles,
    tokenizer: PreTrainedTokenizerBase,
    temperature: float,
    n: int,
) -> _Responses:
    prompts = DataProto.from_dict({}, {"prompt_ids": [row["prompt_ids"] for row in chosen], "row": chosen}).repeat(n)
    seeds = response_seeds([config.trainer.seed, 0, 0], len(prompts))
    batch = roles.rollout.generate_sequences(prompts.union(DataProto.from_dict({}, {"seed": seeds})), temperature)
    texts, results = answer_texts(batch, tokenizer), collect_results(batch, roles.model_scores, tokenizer)
    failed_B = torch.tensor([status == "failed" for status in batch.non_tensor_batch["status"]])
    ended = [result for result, failed in zip(results, failed_B.tolist(), strict=True) if not failed]
    check_failed(ended, 0.0, "held-out responses")
    if failed_B.sum() > config.reward.max_failed_share * len(batch):
        raise TransientError(
            f"{int(failed_B.sum())} of {len(batch)} held-out conversations failed "
            f"(limit: reward.max_failed_share={config.reward.max_failed_share}): "
            f"{results[int(failed_B.int().argmax())].detail}"
        )
    score_B = torch.tensor([result.score or 0.0 for result in results])
    return _Responses(score_B + config.reward.turn_weight * batch.batch["turn_reward"] * ~failed_B, texts, batch)
