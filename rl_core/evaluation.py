"""Scores of the current policy on the held-out rows, greedy and sampled, through the rollout engine."""

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rl_core.cluster.roles import Roles
from rl_core.config.schema import RunConfig
from rl_core.data.dataset import RLHFDataset
from rl_core.data.protocol import DataProto
from rl_core.errors import TransientError
from rl_core.steps import answer_texts, response_seeds, scores

SAMPLES_SHOWN = 20


def evaluate(config: RunConfig, rows: RLHFDataset, roles: Roles, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Mean greedy score, mean sampled score over `evaluation.sampled_n` responses a prompt, and a few answers.

    As in training, what tools and environment gave is part of a score. A conversation that has failed has 0; raises
    TransientError when these are more than `reward.max_failed_share`, or a response could not be scored.
    Seeds depend on the run's seed only, so the scores before and after training are of the same draws.
    """
    greedy, texts = _scores(config, rows, roles, tokenizer, 0.0, 1)
    sampled, _ = _scores(config, rows, roles, tokenizer, config.evaluation.temperature, config.evaluation.sampled_n)
    samples = [
        {
            "prompt": rows[i]["prompt"][-1]["content"],
            "ground_truth": rows[i]["reward_model"]["ground_truth"],
            "answer": texts[i],
            "score": greedy[i].item(),
        }
        for i in range(min(SAMPLES_SHOWN, len(rows)))
    ]
    return {"greedy": greedy.mean().item(), "sampled": sampled.mean().item(), "rows": len(rows), "samples": samples}


def _scores(
    config: RunConfig,
    rows: RLHFDataset,
    roles: Roles,
    tokenizer: PreTrainedTokenizerBase,
    temperature: float,
    n: int,
) -> tuple[torch.Tensor, list[str]]:
    chosen = [rows[i] for i in range(len(rows))]
    prompts = DataProto.from_dict({}, {"prompt_ids": [row["prompt_ids"] for row in chosen], "row": chosen}).repeat(n)
    seeds = response_seeds([config.trainer.seed, 0, 0], len(prompts))
    batch = roles.rollout.generate_sequences(prompts.union(DataProto.from_dict({}, {"seed": seeds})), temperature)
    texts, results = answer_texts(batch, tokenizer), scores(batch, roles.model_scores, tokenizer)
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
    return score_B + config.reward.turn_weight * batch.batch["turn_reward"] * ~lost_B, texts
