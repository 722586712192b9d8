"""Settings of scoring: scorers, reward model, judge, deadlines and the limit on failures."""

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rl_core.config.learning import ALWAYS, CODE, MAX_PROCESSES, MAX_SECONDS, MAX_VALUE, Section, Trusted

Score = Annotated[float, Field(ge=-MAX_VALUE, le=MAX_VALUE)]
Isolation = Literal["namespaces", "none"]


class RewardModelConfig(Section):
    """A reward model that scores finished conversations."""

    path: str | None = None
    """Folder of a sequence-classification checkpoint with one label; unset: no reward model. Conversations are encoded
    with its own tokenizer and chat template; without a template, all texts are joined."""
    weight: float = Field(1.0, ge=-MAX_VALUE, le=MAX_VALUE)
    """Weight of its score in the sum with the scorer's; the unweighted score is the named reward `model`."""
    nodes: int = Field(1, ge=1, le=100_000)
    """Machines of its separate pool; used only with `ranks_per_node`."""
    ranks_per_node: int | None = Field(None, ge=1, le=MAX_PROCESSES)
    """Worker processes per machine of its separate pool; unset shares the slots of actor and critic."""


class JudgeConfig(Section):
    """A language model behind an OpenAI-compatible server that scores the rows whose scorer is `judge`."""

    url: Annotated[str | None, ALWAYS] = None
    """URL of the server, as in http://127.0.0.1:8000/v1; unset: no judge."""
    model: str = ""
    """Name of the model on the server."""
    key_env: Annotated[str | None, ALWAYS] = None
    """Name, in capitals, of the environment variable that holds the API key; unset sends none."""
    prompt: str = (
        "Question:\n{prompt}\n\nReference answer:\n{ground_truth}\n\nAnswer to judge:\n{response}\n\n"
        "Judge the answer by the reference. End with a line `Score: ` and a number from 0 (wrong) to 1 (right)."
    )
    """Prompt sent to the judge; {prompt}, {response} and {ground_truth} are replaced. The response stands between two
    lines with a code that is new for each request, and a sentence before the prompt says that it has no instructions
    for the judge."""
    score_pattern: str = r"(?i)[*_# ]*score[*_ ]*:[*_ ]*([-+]?\d+(?:\.\d+)?)[*_. ]*"
    """Regular expression that matches the whole last line of the judge's answer; its first group is the score."""
    score_field: str | None = None
    """Field of the JSON object at the end of the judge's answer that holds the score; replaces `score_pattern`."""
    score_range: tuple[Score, Score] = (0.0, 1.0)
    """Smallest and largest score that the prompt allows; a response with any other has none."""
    requests: int = Field(16, ge=1, le=10_000)
    """Concurrent requests per rollout engine."""
    timeout_s: float = Field(60.0, gt=0, le=MAX_SECONDS)
    """Seconds without data from the server after which a request fails."""
    retries: int = Field(4, ge=0, le=100)
    """Retries, with increasing delays, if the server is busy (429), failing (5xx), silent or unreachable."""

    @model_validator(mode="after")
    def _usable(self) -> "JudgeConfig":
        try:
            groups = re.compile(self.score_pattern).groups
        except re.error:
            groups = 0
        low, high = self.score_range
        checks: list[tuple[object, str]] = [
            (low < high, "reward.judge.score_range must be two numbers, the smaller one first"),
            (groups >= 1, "reward.judge.score_pattern must be a regular expression with a group for the score"),
            ("{response}" in self.prompt, "reward.judge.prompt must contain {response}"),
            (
                re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.key_env or "_"),
                "reward.judge.key_env must be the name, in capitals, of the environment variable that holds the key",
            ),
            (
                not self.url or self.model,
                "reward.judge.url requires reward.judge.model, the name of the model on the server",
            ),
        ]
        if problems := [message for passed, message in checks if not passed]:
            raise ValueError("; ".join(problems))
        return self


class CodeConfig(Section):
    """How programs written by the policy are run by scorer `code`."""

    isolation: Annotated[Isolation, Trusted("^none$")] = "namespaces"
    """`namespaces` locks each program into namespaces of its own, and refuses the run where the kernel does not allow
    them; `none` runs programs with all rights of the run's user to files, network and processes (docs/rewards.md)."""

    @property
    def risk(self) -> str:
        """Warning for pages and commands; empty if programs are isolated."""
        if self.isolation == "namespaces":
            return ""
        return (
            "Programs written by the model are not isolated (reward.code.isolation=none): they can read answers and "
            "credentials, write files and use the network as the run's user can."
        )


class RewardConfig(Section):
    """Scorers, their deadline and the limit on failures."""

    function: Annotated[str | None, CODE] = None
    """Scorer for all rows: a name from rl_core/rewards/scorers.py or `package.module:function`; unset selects the
    scorer by each row's `data_source` (see `sources`); `none` scores 0. It returns a number, or a dict with `score` and
    additional named rewards."""
    sources: Annotated[tuple[str, ...], CODE] = ()
    """Scorers by data source as NAME=SCORER, for example my_rows=my_rewards:score: the scorer of the rows with this
    `data_source`. A row names a built-in scorer or source without an entry, and never a function."""
    extra_functions: Annotated[tuple[str, ...], CODE] = ()
    """Additional scorers as NAME=WEIGHT: WEIGHT × score is added to the scorer's. The unweighted score is a named
    reward, under NAME or the function's name. If any of them fails, the response has no score."""
    model: RewardModelConfig = RewardModelConfig()
    """Reward model used in addition to the scorer."""
    judge: JudgeConfig = JudgeConfig()
    """The model that scorer `judge` queries (docs/rewards.md)."""
    code: CodeConfig = CodeConfig()
    """Isolation of programs that scorer `code` runs (docs/rewards.md)."""
    turn_weight: float = Field(1.0, ge=-MAX_VALUE, le=MAX_VALUE)
    """Weight of the rewards of tools and environment in the sum with the scorer's."""
    timeout_s: float = Field(10.0, gt=0, le=MAX_SECONDS)
    """Seconds to score one response; then the scoring process is killed and the response counts as failed."""
    processes: int = Field(1, ge=1, le=MAX_PROCESSES)
    """Scoring processes per rollout engine."""
    memory_gb: float = Field(8.0, gt=0, le=1e6)
    """Memory limit of a scoring process in GiB; a scorer that exceeds it fails on that response."""
    max_failed_share: float = Field(0.1, ge=0, le=1)
    """Maximum share of a step's responses that may fail to score; above it the step fails."""
    shuffle_control: bool = False
    """Negative control: assign each reward to another prompt of the step, so the model should learn nothing."""

    @property
    def extra_weights(self) -> dict[str, float]:
        """Weight of each additional scorer by its full name."""
        return {name: float(weight) for name, weight in (entry.split("=") for entry in self.extra_functions)}

    @property
    def by_source(self) -> dict[str, str]:
        """Scorer of each data source in `sources`."""
        return {name: scorer for name, _, scorer in (entry.partition("=") for entry in self.sources)}

    @model_validator(mode="after")
    def _named(self) -> "RewardConfig":
        if not all(re.fullmatch(r"[^=]+=[^=]+", entry) for entry in self.sources):
            raise ValueError(
                "reward.sources takes entries of the form NAME=SCORER such as my_rows=my_rewards:score, not "
                f"{', '.join(self.sources)}"
            )
        if len(self.by_source) < len(self.sources):
            raise ValueError(f"reward.sources requires distinct names, not {', '.join(self.sources)}")
        if self.function and self.sources:
            raise ValueError("reward.function is the scorer of all rows, so that reward.sources would have no effect")
        if not all(re.fullmatch(r"[^=]+=-?\d{1,12}(\.\d+)?", entry) for entry in self.extra_functions):
            raise ValueError(
                "reward.extra_functions takes entries of the form NAME=WEIGHT such as my_rewards:short=0.2, not "
                f"{', '.join(self.extra_functions)}"
            )
        short = [short_name(entry.partition("=")[0]) for entry in self.extra_functions]
        if len(set(short)) < len(short):
            raise ValueError(f"reward.extra_functions requires scorers with distinct names, not {', '.join(short)}")
        return self


def short_name(scorer: str) -> str:
    """Name of a scorer's reward: the function's name for `package.module:function`, else the scorer's name."""
    return scorer.rpartition(":")[2]
