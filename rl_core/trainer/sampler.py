"""Builds a step's scored batch: rollouts, scores, greedy baselines and dynamic sampling."""

from transformers import PreTrainedTokenizerBase

from rl_core.algorithms.advantages import group_index
from rl_core.algorithms.masked import masked_mean
from rl_core.algorithms.shaping import groups_with_spread
from rl_core.config.schema import RunConfig
from rl_core.data.protocol import DataProto, Metrics
from rl_core.errors import TrainingError
from rl_core.trainer.metrics import Phases, spread
from rl_core.trainer.reward_columns import align_named_rewards, apply_overlong_penalty, assign_scores
from rl_core.trainer.rollout_queue import RolloutQueue


class Sampler:
    """Builds the batch that a step trains on."""

    def __init__(self, config: RunConfig, queue: RolloutQueue, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config, self.queue, self.tokenizer = config, queue, tokenizer
        self.rollout, self.model = queue.roles.rollout, queue.roles.model_scores

    def batch(self, step: int, phase: Phases) -> tuple[DataProto, Metrics]:
        """Returns scored responses to `data.train_batch_size` prompts, and metrics.

        Starts the rollouts of later steps, up to the maximum staleness. Dynamic sampling drops groups with equal scores
        and refills the batch from further prompts.

        The columns are those of the rollouts (docs/architecture.md) without `score` and `named`, plus
        `token_level_scores` and `token_level_shaped` [B, R], `scored` [B], `score_status` and `score_detail` [B],
        `reward_named/…` [B] for each named reward, and `greedy_reward_B` [B] if the estimator needs greedy baselines.

        Raises TransientError if more than `reward.max_failed_share` of the responses are unscored, InputError if a
        named reward that the estimator needs is missing, TrainingError if dynamic sampling finds too few groups or the
        engines served wrong weights, and errors of the rollouts unchanged.
        """
        with phase("rollout"):
            for ahead in range(step, min(step + self.config.max_staleness, self.config.trainer.steps) + 1):
                self.queue.begin(ahead)
        most = self.config.algorithm.max_generated_batches
        if not most:
            batch = self._generate(step, 0, phase)
            with phase("score"):
                return apply_overlong_penalty(batch, self.config), self._staleness(batch, step)
        with phase("score"):
            batch, metrics = self._useful(step, most, phase)
            return apply_overlong_penalty(batch, self.config), metrics | self._staleness(batch, step)

    def _useful(self, step: int, most: int, phase: Phases) -> tuple[DataProto, Metrics]:
        """The step's rows from at most `most` generated batches: groups with different scores first."""
        size = self.config.data.train_batch_size * self.config.rollout.n
        useful: list[DataProto] = []
        flat: list[DataProto] = []
        made = found = 0
        while found < size and made < most:
            batch = self._generate(step, made, phase)
            spread_B = groups_with_spread(
                batch.batch["token_level_scores"].sum(-1), group_index(list(batch.non_tensor_batch["uid"]))
            )
            spread_B &= (batch.batch["response_mask"] > 0).any(-1)  # a prompt may lack a greedy baseline
            spread_B = spread_B.view(-1, self.config.rollout.n).any(1).repeat_interleave(self.config.rollout.n)
            useful.append(batch[spread_B])
            flat.append(batch[~spread_B])
            made, found = made + 1, found + int(spread_B.sum())
        self.rollout.sleep()
        if found < size and self.config.algorithm.when_too_few_groups == "stop":
            raise TrainingError(
                f"step {step}: {made} generated batches contain {found // self.config.rollout.n} groups with different "
                f"scores (minimum {size // self.config.rollout.n}): the data are too easy or too hard for the model "
                "(algorithm.max_generated_batches, algorithm.when_too_few_groups)"
            )
        generated = DataProto.concat(align_named_rewards([*useful, *flat], self.config))
        batch = generated[:size]
        score = masked_mean(generated.batch["token_level_scores"].sum(-1), generated.batch["scored"].float()).item()
        return batch, {
            "sampling/generated_batches": float(made),
            "sampling/generated_score": score,
            "sampling/useful_share": min(found / size, 1.0),
        }

    def _generate(self, step: int, attempt: int, phase: Phases) -> DataProto:
        config = self.config
        with phase("rollout"):
            batch, greedy = self.queue.take(step, attempt)
            made = [batch] if greedy is None else [batch, greedy]
            phase.count("rollout", float(sum(part.batch["response_mask"].sum() for part in made)))
            if not config.algorithm.max_generated_batches:
                self.rollout.sleep()
        with phase("score"):
            self._check_versions(batch, step)
            batch = assign_scores(batch, self.model, self.tokenizer, config, step)
            if greedy is not None:
                scored = assign_scores(greedy, self.model, self.tokenizer, config, step)
                reward_B = scored.batch["token_level_scores"].sum(-1).repeat_interleave(config.rollout.n)
                # Without a score of the greedy response there is no baseline: mask the prompt's responses.
                has_baseline_B = scored.batch["scored"].repeat_interleave(config.rollout.n)
                mask_BR = batch.batch["response_mask"] * has_baseline_B[:, None]
                added = {"greedy_reward_B": reward_B, "response_mask": mask_BR}
                batch = DataProto({**batch.batch, **added}, batch.non_tensor_batch)
        return batch

    def _check_versions(self, batch: DataProto, step: int) -> None:
        served = batch.batch["version"][batch.batch["response_mask"] > 0].unique().tolist()
        allowed = range(step - 1 - self.config.max_staleness, step)
        if any(version not in allowed for version in served):
            raise TrainingError(
                f"step {step} needs rollouts of weights version {step - 1}"
                + (f" (maximum staleness {self.config.max_staleness})" if self.config.max_staleness else "")
                + f"; the engine served {', '.join(map(str, served))}"
            )

    def _staleness(self, batch: DataProto, step: int) -> Metrics:
        """Staleness of the sampled tokens in steps, live engines and redispatched rows; empty in mode `sync`."""
        if not self.config.max_staleness:
            return {}
        versions = batch.batch["version"][batch.batch["response_mask"] > 0]
        return {
            **spread("rollout/staleness", (step - 1 - versions).float()),
            "rollout/engines": float(self.rollout.engines),
            "rollout/redispatched": float(self.rollout.redispatched),
        }
