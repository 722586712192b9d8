"""The settings of scoring: who gives a response its score, and what failing may cost."""

from pydantic import Field

from rl_core.config.learning import Section


class RewardModelConfig(Section):
    path: str | None = None
    """Folder of a sequence-classification checkpoint with one label that scores finished conversations; unset: none.
    It reads them with its own tokenizer and chat template, or where it has no template, all texts joined."""
    weight: float = 1.0
    """What its score is multiplied with before it is added to the scorer's; unweighted it is the named reward
    `model`."""
    nodes: int = Field(1, ge=1)
    """Machines of its own pool; only read with `ranks_per_node`."""
    ranks_per_node: int | None = Field(None, ge=1)
    """Worker processes a machine of its own pool; unset shares the places of actor and critic."""


class RewardConfig(Section):
    function: str | None = None
    """Scorer for all rows: a name from rl_core/rewards/scorers.py or `package.module:function`; unset takes the
    scorer of each row's `data_source`, `none` gives 0. It returns a number, or a dict with `score` and further named
    rewards."""
    model: RewardModelConfig = RewardModelConfig()
    """A reward model beside the scorer."""
    turn_weight: float = 1.0
    """What the rewards of tools and environment are multiplied with before they are added to the scorer's."""
    timeout_s: float = Field(10.0, gt=0)
    """Seconds for one response; then the scoring process is killed and the response counts as failed."""
    processes: int = Field(1, ge=1)
    """Scoring processes."""
    max_failed_share: float = Field(0.1, ge=0, le=1)
    """Share of a step's responses that may fail to score; above it the step stops."""
    shuffle_control: bool = False
    """Negative control: hand each reward to another prompt of the step. Nothing should be learned."""
