"""Rows choose among the scorers that the settings allow, and the user's scorers are tried on one row."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from support_data import row

from rl_core.config.reward import RewardConfig
from rl_core.data.rows import NotScored
from rl_core.errors import InputError
from rl_core.rewards.row_check import RowCheck
from rl_core.rewards.runner import RewardRunner, check_scorers, scorer_of

HOSTILE = [
    "builtins:eval",
    "builtins:exec",
    "runpy:run_path",
    "os:system",
    "scorers_for_tests:process",
    ":",
    "a:",
    "x:y:z",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_a_row_never_names_a_function(source: str) -> None:
    config = RewardConfig(sources=("mine=scorers_for_tests:process",), extra_functions=("numeric=1",))
    with pytest.raises(InputError, match="rows cannot name functions"):
        scorer_of(config, source)
    with pytest.raises(InputError, match="rows cannot name functions"):
        check_scorers(config, {source: "row 1"})
    with pytest.raises(NotScored, match="rows cannot name functions"):
        RowCheck(config)(row("1", data_source=source), "row 1")

    async def work() -> None:
        async with RewardRunner(config) as runner:
            with pytest.raises(InputError, match="rows cannot name functions"):
                await runner.score("1", row("1", data_source=source))
            with pytest.raises(InputError, match="rows cannot name functions"):
                runner.reads_trajectory(row("1", data_source=source))

    asyncio.run(work())


def test_a_setting_names_the_scorers_of_sources() -> None:
    config = RewardConfig(sources=("os:system=exact", "openai/gsm8k=gsm8k", "mine=scorers_for_tests:process"))
    names = {"os:system": "exact", "openai/gsm8k": "gsm8k", "mine": "scorers_for_tests:process"}
    names |= {"sort_digits": "exact", "math": "math", "numeric": "numeric"}
    assert {name: scorer_of(config, name) for name in names} == names
    check_scorers(config, dict.fromkeys(names, "row 1"))
    with pytest.raises(InputError, match="absent_package") as error:
        check_scorers(RewardConfig(sources=("mine=absent_package:score",)), {})
    assert error.value.where == "reward.sources"

    async def work() -> float | None:
        async with RewardRunner(config) as runner:
            return (await runner.score("#### 7", row("7", data_source="openai/gsm8k"))).score

    assert asyncio.run(work()) == 1.0


BODIES = {
    "fine": "return 1.0",
    "named": "return {'score': 1, 'length': 2.0}",
    "text": "return 'right'",
    "nothing": "return None",
    "nan": "return float('nan')",
    "raises": "return [][0]",
    "hangs": "time.sleep(60)",
    "dies": "os.kill(os.getpid(), 9)",
    "needs_truth": "return float(response == row['reward_model']['ground_truth']) / (response == '7')",
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's with a function for each body, and one that takes the trajectory."""
    code = "import os, time\n"
    code += "".join(f"def {name}(response, row):\n    {body}\n" for name, body in BODIES.items())
    code += "async def turns(response, row, trajectory):\n    return float(trajectory['turns'])\n"
    (tmp_path / "scorers_of_a_user.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "scorers_of_a_user"


def tried(**settings: Any) -> None:
    check = RowCheck(RewardConfig(**settings))
    check(row("7"), "train row 3")
    check(row("8"), "train row 4")
    check.try_scorers()


def test_a_scorer_without_a_mistake_passes(module: str) -> None:
    tried(function=f"{module}:fine", extra_functions=(f"{module}:turns=1", f"{module}:named=1"))
    tried(function=f"{module}:needs_truth")
    tried(function="exact")


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("text", "returned 'right'"),
        ("nothing", "returned None"),
        ("nan", "non_finite"),
        ("raises", "IndexError: list index out of range .File .*scorers_of_a_user.py"),
        ("hangs", "timeout: .*timeout_s=1 s"),
        ("dies", "died with exit code -9"),
    ],
)
def test_a_mistake_of_a_scorer_is_a_users_error(module: str, name: str, seen: str) -> None:
    timeout_s = 1.0 if name == "hangs" else 30.0
    for settings in ({"function": f"{module}:{name}"}, {"extra_functions": (f"{module}:{name}=1",)}):
        with pytest.raises(InputError, match=seen) as error:
            tried(**settings, timeout_s=timeout_s)
        assert "train row 3" in error.value.where and "correct the scorer" in error.value.fix


def test_nothing_of_a_row_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named_by_a_row.py").write_text(f"open({str(tmp_path / 'LEFT')!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "named_by_a_row:score"
    check = RowCheck(RewardConfig())
    with pytest.raises(NotScored, match="set reward.function=MODULE:FUNCTION"):
        check(row("1", data_source=name), "row 1")
    fields: list[dict[str, Any]] = [{"ability": name}, {"extra_info": {"task": name}}, {"scorer": name}]
    for changes in fields:
        check(row("1", **changes), "row 1")
    assert "named_by_a_row" not in sys.modules and not (tmp_path / "LEFT").exists()
