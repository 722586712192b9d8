"""The settings of scoring: who gives a response its score, and what failing may cost."""

import re

from pydantic import Field, model_validator

from rl_core.config.learning import Section


class RewardModelConfig(Section):
    """A reward model that scores finished conversations."""

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


class JudgeConfig(Section):
    """A language model behind an OpenAI-compatible server that scores the rows whose scorer is `judge`."""

    url: str | None = None
    """Address of the server, as in http://127.0.0.1:8000/v1; unset: no judge."""
    model: str = ""
    """Name of the model at the server."""
    key_env: str | None = None
    """NAME, in capitals, of the environment variable that holds the key; unset sends none."""
    prompt: str = (
        "Question:\n{prompt}\n\nReference answer:\n{ground_truth}\n\nAnswer to judge:\n{response}\n\n"
        "Judge the answer by the reference. End with a line `Score: ` and a number from 0 (wrong) to 1 (right)."
    )
    """What the judge is asked; {prompt}, {response} and {ground_truth} are filled in."""
    score_pattern: str = r"(?i)score:\s*([-+]?\d+(?:\.\d+)?)"
    """Regular expression whose first group, where it last matches the judge's answer, is the score."""
    score_field: str | None = None
    """Field of the JSON object in the judge's answer that is the score; read instead of `score_pattern`."""
    requests: int = Field(16, ge=1)
    """Requests at a time of each rollout engine."""
    timeout_s: float = Field(60.0, gt=0)
    """Seconds without a word of the server after which a request has failed."""
    retries: int = Field(4, ge=0)
    """Further tries, ever longer apart, when the server is busy (429), broken (5xx), silent or out of reach."""

    @model_validator(mode="after")
    def _usable(self) -> "JudgeConfig":
        try:
            groups = re.compile(self.score_pattern).groups
        except re.error:
            groups = 0
        checks: list[tuple[object, str]] = [
            (groups >= 1, "reward.judge.score_pattern must be a regular expression with a group that is the score"),
            ("{response}" in self.prompt, "reward.judge.prompt must have a place {response}"),
            (
                re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.key_env or "_"),
                "reward.judge.key_env must be the NAME, in capitals, of the environment variable that holds the key",
            ),
            (not self.url or self.model, "reward.judge.url needs reward.judge.model, the model's name at the server"),
        ]
        if problems := [message for fine, message in checks if not fine]:
            raise ValueError("; ".join(problems))
        return self


class RewardConfig(Section):
    """The scorers, their deadline and their budget of failures."""

    function: str | None = None
    """Scorer for all rows: a name from rl_core/rewards/scorers.py or `package.module:function`; unset takes the
    scorer of each row's `data_source`, `none` gives 0. It returns a number, or a dict with `score` and further named
    rewards."""
    extra_functions: tuple[str, ...] = ()
    """Scorers beside it as NAME=WEIGHT: WEIGHT times their score is added to the scorer's; unweighted it is a named
    reward, called by the name or the function's name. A response that one of them gives no score has none."""
    model: RewardModelConfig = RewardModelConfig()
    """A reward model beside the scorer."""
    judge: JudgeConfig = JudgeConfig()
    """The judge that scorer `judge` asks (docs/rewards.md)."""
    turn_weight: float = 1.0
    """What the rewards of tools and environment are multiplied with before they are added to the scorer's."""
    timeout_s: float = Field(10.0, gt=0)
    """Seconds for one response; then the scoring process is killed and the response counts as failed."""
    processes: int = Field(1, ge=1)
    """Scoring processes of each rollout engine."""
    memory_gb: float = Field(8.0, gt=0)
    """GiB that a scoring process may take; a scorer that wants more fails on its response."""
    max_failed_share: float = Field(0.1, ge=0, le=1)
    """Share of a step's responses that may fail to score; above it the step stops."""
    shuffle_control: bool = False
    """Negative control: hand each reward to another prompt of the step. Nothing should be learned."""

    @property
    def extra_weights(self) -> dict[str, float]:
        """The weight of each further scorer, by its whole name."""
        return {name: float(weight) for name, weight in (entry.split("=") for entry in self.extra_functions)}

    @model_validator(mode="after")
    def _named(self) -> "RewardConfig":
        if not all(re.fullmatch(r"[^=]+=-?\d+(\.\d+)?", entry) for entry in self.extra_functions):
            raise ValueError(
                "reward.extra_functions takes entries NAME=WEIGHT such as my_rewards:short=0.2, not "
                f"{', '.join(self.extra_functions)}"
            )
        short = [short_name(entry.partition("=")[0]) for entry in self.extra_functions]
        if len(set(short)) < len(short):
            raise ValueError(f"reward.extra_functions needs scorers with different names, not {', '.join(short)}")
        return self


def short_name(scorer: str) -> str:
    """What a scorer is called among named rewards: the function's name where it is `package.module:function`."""
    return scorer.rpartition(":")[2]
