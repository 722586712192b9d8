"""Scores of a policy on the held-out rows, greedy and sampled, through the rollout engine; kept, so that the same
weights are scored once on the same rows."""

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
from rl_core.storage.store import Json, Store
from rl_core.trainer.batch import response_seeds
from rl_core.trainer.scoring import answer_texts, collect_results

SAMPLES_SHOWN = 20
TURNS_KEPT = 8
"""Greedy first turns whose tokens are kept, for the test that a version can be loaded."""
RIGHT = 0.5
"""Score from which a response counts as right in pass@k."""
LEVEL = 0.95
"""Share of the intervals that are shown."""
METRICS = ("greedy", "sampled", "pass_at_k", "maj_at_k")
# Settings beside those of the evaluation that a score depends on.
_SCORING = ("reward.", "agent.", "rollout.top_", "model.dtype", "evaluation.refusal_pattern")


@dataclass(frozen=True)
class _Responses:
    """B = rows × n responses, those of a row together."""

    score_B: torch.Tensor
    texts: list[str]
    batch: DataProto

    def column(self, name: str) -> list[Any]:
        tensors, others = self.batch.batch, self.batch.non_tensor_batch
        return list(tensors[name].tolist() if name in tensors else others[name])


def evaluate(config: RunConfig, rows: RLHFDataset, roles: Roles, tokenizer: PreTrainedTokenizerBase) -> Json:
    """What the policy is worth on the held-out rows, as JSON (docs/promotion.md lists the keys).

    Greedy score, and of `evaluation.sampled_n` responses a prompt their mean (avg@k), pass@k and maj@k; all with
    intervals and by data source. As in training, what tools and environment gave is part of a score. A conversation
    that has failed has 0; raises TransientError when these are more than `reward.max_failed_share`, or a response could
    not be scored. Seeds depend on the run's seed only, so the scores of two models are of the same draws.
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
    """Means, intervals, scores by source and guards of an evaluation's rows; `seed` is that of the resampling."""
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
    """What a response comes down to: its last box, or else its last line; responses that agree in it are one answer."""
    box = last_box(text)
    return box.strip() if box is not None else (text.strip().splitlines() or [""])[-1].strip()


def settings_of(config: RunConfig) -> Json:
    """What a score depends on beside weights and rows: how answers are drawn, and a hash of how they are scored."""
    scoring = {key: value for key, value in identity(config).items() if key.startswith(_SCORING)}
    return {
        "sampled_n": config.evaluation.sampled_n,
        "temperature": config.evaluation.temperature,
        "max_response_length": config.data.max_response_length,
        "seed": config.trainer.seed,
        "scoring": _digest(scoring),
    }


def rows_hash(rows: Sequence[Row]) -> str:
    """sha256 (hexadecimal) of the rows: the same for the same rows in the same order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(canonical(row).encode() + b"\n")
    return digest.hexdigest()


def cached(root: Store, weights: str, data: str, settings: Json, make: Callable[[], Json]) -> Json:
    """The evaluation of these weights on these rows with these settings; made and kept where there is none.

    `root` is the storage root that the runs share; the file is `evaluations/<weights>-<data>-<settings>.json`.
    """
    name = f"evaluations/{weights[:16]}-{data[:16]}-{_digest(settings)[:8]}.json"
    if not root.exists(name):
        root.write_json(name, {**make(), "weights": weights, "data": data, "settings": settings})
    result: Json = root.read_json(name)
    return result


def _digest(value: Json) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _value(row: Json, metric: str) -> float:
    """A row's value of a metric."""
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
    """Tokens of some prompts, and of what the policy answered until anything else spoke."""
    on = greedy.batch[:TURNS_KEPT].batch
    answered = on["response_mask"].cumprod(-1).sum(-1).int().tolist()
    return [
        # The prompt that was used: an environment may have spoken before the first turn.
        {"prompt_ids": prompt[:length].tolist(), "response_ids": ids[:first].tolist()}
        for prompt, length, ids, first in zip(
            on["prompts"], on["prompt_length"].tolist(), on["responses"], answered, strict=True
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
    lost_B = torch.tensor([status == "failed" for status in batch.non_tensor_batch["status"]])
    unscored = [r for r, lost in zip(results, lost_B.tolist(), strict=True) if r.score is None and not lost]
    if unscored:
        raise TransientError(f"{len(unscored)} held-out responses could not be scored: {unscored[0].detail}")
    if lost_B.sum() > config.reward.max_failed_share * len(batch):
        raise TransientError(
            f"{int(lost_B.sum())} of {len(batch)} held-out conversations have failed, more than "
            f"reward.max_failed_share={config.reward.max_failed_share}: {results[int(lost_B.int().argmax())].detail}"
        )
    score_B = torch.tensor([result.score or 0.0 for result in results])
    return _Responses(score_B + config.reward.turn_weight * batch.batch["turn_reward"] * ~lost_B, texts, batch)
