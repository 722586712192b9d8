"""From the loader's prompts to a step's scored responses: rollout, scores, greedy baselines, dynamic sampling."""

from transformers import PreTrainedTokenizerBase

from rl_core import steps
from rl_core.algorithms.advantages import ESTIMATORS, group_index
from rl_core.algorithms.masked import masked_mean
from rl_core.algorithms.shaping import groups_with_spread
from rl_core.cluster.roles import Roles
from rl_core.config.schema import RunConfig
from rl_core.data.dataset import RLHFDataset
from rl_core.data.loader import StatefulLoader
from rl_core.data.protocol import DataProto
from rl_core.errors import TrainingError
from rl_core.metrics import Metrics, Phases
from rl_core.rewards.runner import Scoring


class Sampler:
    """Makes the batch that a step trains on."""

    def __init__(
        self,
        config: RunConfig,
        rows: RLHFDataset,
        loader: StatefulLoader,
        roles: Roles,
        rewards: Scoring,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.config, self.rows, self.loader, self.roles = config, rows, loader, roles
        self.rewards, self.tokenizer = rewards, tokenizer
        self.needs_greedy = "greedy_reward_B" in ESTIMATORS.resolve(config.algorithm.estimator).needs

    def batch(self, step: int, phase: Phases) -> tuple[DataProto, Metrics]:
        """Scored responses to `data.train_batch_size` prompts, and how they came about.

        With dynamic sampling, groups of equal scores are dropped and refilled from further prompts.
        """
        most = self.config.algorithm.max_generated_batches
        if not most:
            return steps.shaped(self._generate(step, 0, phase), self.config), {}
        size = self.config.data.train_batch_size * self.config.rollout.n
        useful: list[DataProto] = []
        flat: list[DataProto] = []
        made = found = 0
        while found < size and made < most:
            batch = self._generate(step, made, phase)
            spread_B = groups_with_spread(
                batch.batch["token_level_scores"].sum(-1), group_index(list(batch.non_tensor_batch["uid"]))
            )
            spread_B = spread_B.view(-1, self.config.rollout.n).any(1).repeat_interleave(self.config.rollout.n)
            useful.append(batch[spread_B])
            flat.append(batch[~spread_B])
            made, found = made + 1, found + int(spread_B.sum())
        if found < size and self.config.algorithm.when_too_few_groups == "stop":
            raise TrainingError(
                f"step {step}: {made} generated batches gave {found // self.config.rollout.n} groups with different "
                f"scores, {size // self.config.rollout.n} are needed: the data are too easy or too hard for the model "
                "(algorithm.max_generated_batches, algorithm.when_too_few_groups)"
            )
        generated = DataProto.concat([*useful, *flat])
        batch = generated[:size]
        score = masked_mean(generated.batch["token_level_scores"].sum(-1), generated.batch["scored"].float()).item()
        metrics = {
            "sampling/generated_batches": float(made),
            "sampling/generated_score": score,
            "sampling/useful_share": min(found / size, 1.0),
        }
        return steps.shaped(batch, self.config), metrics

    def _generate(self, step: int, attempt: int, phase: Phases) -> DataProto:
        config, actor = self.config, self.roles.actor
        with phase("rollout"):
            prompts = steps.prompt_batch(self.rows, self.loader.next(), config, step, attempt)
            batch = actor.generate_sequences(prompts, config.rollout.temperature)
            greedy = actor.generate_sequences(prompts[:: config.rollout.n], 0.0) if self.needs_greedy else None
            made = [batch] if greedy is None else [batch, greedy]
            phase.count("rollout", float(sum(part.batch["response_length"].sum() for part in made)))
            if not config.algorithm.max_generated_batches:
                actor.sleep_rollout()
        served = set(batch.batch["version"].tolist())
        if served != {step - 1}:
            raise TrainingError(f"step {step} needs rollouts of weights version {step - 1}, the engine served {served}")
        with phase("score"):
            batch = steps.score(batch, self.rewards, self.tokenizer, config, step)
            if greedy is not None:
                scored = steps.score(greedy, self.rewards, self.tokenizer, config, step)
                reward_B = scored.batch["token_level_scores"].sum(-1).repeat_interleave(config.rollout.n)
                batch = batch.union(DataProto({"greedy_reward_B": reward_B}, {}, {}))
        return batch
