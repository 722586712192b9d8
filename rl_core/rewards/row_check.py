"""Checks of rows by the scorers that a run would use, and a trial of the user's scorers before anything starts."""

import asyncio
from typing import Any

from rl_core.config.reward import RewardConfig
from rl_core.data.rows import NotScored
from rl_core.errors import InputError
from rl_core.rewards.code import code
from rl_core.rewards.judge import JUDGE, check_judge
from rl_core.rewards.programs import check_isolation
from rl_core.rewards.runner import RewardRunner, scorer_of
from rl_core.rewards.scorers import (
    BrokenTruth,
    Row,
    check_truth,
    is_builtin,
    resolve_scorer,
    truth_of,
    wants_trajectory,
)
from rl_core.rewards.worker import RewardResult


class RowCheck:
    """Called with each row and its location; keeps the first row of each scorer of the user's for `try_scorers`."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self._own = {name for name in (config.function, *config.by_source.values(), *config.extra_weights) if name}
        self._own = {name for name in self._own if not is_builtin(name)}
        self._first: dict[str, tuple[Row, str]] = {}

    def __call__(self, row: Row, where: str) -> None:
        """Raises NotScored if no scorer scores the row, InputError if the scorer cannot use its ground truth."""
        try:
            scorer = scorer_of(self.config, row["data_source"], f"data_source of {where} (reward.function is unset)")
            names = [scorer, *self.config.extra_weights]
            if code in [resolve_scorer(name) for name in names]:
                check_isolation(self.config.code.isolation)
            if JUDGE in names:
                check_judge(self.config.judge)
        except InputError as error:
            raise NotScored(error.expected, error.seen, error.where, error.fix) from error
        for name in names:
            if name in self._own:
                self._first.setdefault(name, (row, where))
            try:
                check_truth(name, row)
            except BrokenTruth as error:
                fix = "correct the row's ground truth, or choose another scorer for it"
                raise InputError(f"a ground truth for the scorer `{name}`", str(error), where, fix) from error

    def try_scorers(self) -> None:
        """Has each scorer of the user's score the ground truth of one row as a response, in a scoring process.

        Raises InputError for the first that raises, takes too long, or returns anything but finite numbers.
        """
        for name, (row, where) in self._first.items():
            result = asyncio.run(self._trial(name, row))
            if result.status != "ok":
                raise InputError(
                    f"a score from `{name}`: a finite number, or a dict with `score`",
                    f"{result.status}: {_last_lines(result.detail)}",
                    f"its first row, {where}, with the ground truth as response",
                    "correct the scorer (docs/rewards.md)"
                    + (", or raise reward.timeout_s" if result.status == "timeout" else ""),
                )

    async def _trial(self, name: str, row: Row) -> RewardResult:
        response = truth_of(row)
        trajectory = plain_trajectory(response)
        async with RewardRunner(self.config.model_copy(update={"processes": 1})) as runner:
            return await runner.score_by(name, response, row, trajectory if wants_trajectory(name) else None)


def plain_trajectory(response: str) -> dict[str, Any]:
    """The trajectory of a response of a single turn without calls, for scorers that take one."""
    return {
        "messages": [{"role": "assistant", "content": response}],
        "turns": 1,
        "calls": [],
        "stop_reason": "stop",
        "reward": 0.0,
        "response_tokens": len(response),
    }


def _last_lines(detail: str) -> str:
    """The error at the end of a traceback, with the place where it was raised."""
    lines = [line.strip() for line in detail.strip().splitlines()]
    places = [line for line in lines if line.startswith("File ")]
    return lines[-1] + (f" ({places[-1]})" if places else "") if lines else "no detail"
