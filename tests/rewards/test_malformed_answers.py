"""Ten thousand malformed answers through real scoring processes: each has a score, and nothing wrong is right."""

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support_scoring import scored

from rl_core.data.rows import canonical
from rl_core.rewards.runner import RewardResult
from rl_core.rewards.scorers import LAZY, SCORERS

GSM8K = Path(__file__).parents[3] / "shared/data/gsm8k/test.jsonl"
TRUTH = "1729"
NEAR = [
    "1728",
    "1730",
    "17290",
    "-1729",
    "1729.001",
    "0.1729",
    "17,29",
    "1729e1",
    "1728.9",
    "\u0661\u0667\u0662\u0668",
    "l729",
]
ODD = [
    "\0",
    "\ud800",
    "\udfff",
    "\u202e",
    "\u200f",
    "\ufeff",
    "\u0301",
    "\u2028",
    "\\",
    "{",
    "}",
    "$",
    "#",
    "`",
    "\r\n",
]
BAIT = [
    "(" * 300,
    "[" * 300,
    "1," * 300,
    "-" * 300,
    "$-" * 150,
    "a+" * 200 + "!",
    " " * 500 + "x",
    "<answer>" * 50,
    "```py\n" * 60,
]
FRAMES = [
    "{}",
    "#### {}",
    "\\boxed{{{}}}",
    "$\\boxed{{{}}}$",
    "<answer>{}</answer>",
    "```python\n{}\n```",
    "the answer is {}",
]
CHEAP, COSTLY = 1990, {"math": 900, "code": 50, "reasoning_gym": 1100}
"""Answers to each scorer; the costly ones get fewer, and all together 10,000."""


def answer(chance: random.Random) -> str:
    """A wrong answer: near the truth, or odd, within one of the frames that scorers look for."""
    kind = chance.randrange(4)
    if kind == 0:
        inside = chance.choice(NEAR)
    elif kind == 1:
        inside = "".join(chance.choices(ODD, k=chance.randrange(1, 30))) + chance.choice(NEAR)
    elif kind == 2:
        inside = chance.choice(BAIT)
    else:
        inside = "".join(chr(chance.randrange(0x110000)) for _ in range(chance.randrange(1, 80)))
    return chance.choice(FRAMES).format(inside)


def row(name: str) -> dict[str, Any]:
    truth = json.dumps({"tests": [f"assert answer == {TRUTH}"]}) if name == "code" else TRUTH
    entry = canonical({"answer": TRUTH, "question": "?", "metadata": {}})
    return {
        "data_source": name,
        "reward_model": {"ground_truth": truth},
        "extra_info": {"task": "leg_counting", "entry": entry},
    }


def huge() -> list[str]:
    return [piece * (10_000_000 // len(piece)) for piece in ("9", "\\boxed{", "#### 1,", "\u202e1 ", "```python\n")]


def results_of(answers: list[tuple[str, str]], **settings: Any) -> list[RewardResult]:
    return scored([text for _, text in answers], [row(name) for name, _ in answers], **settings)


def test_no_malformed_answer_hangs_crashes_or_is_right() -> None:
    pytest.importorskip("reasoning_gym")
    chance = random.Random(0)
    names = [name for name in [*SCORERS, *LAZY] if name not in ("none", "judge")]
    answers = [(name, answer(chance)) for name in names for _ in range(COSTLY.get(name, CHEAP))]
    answers += [(name, text) for name in names if name != "code" for text in huge()[: 5 if name in SCORERS else 2]]
    assert len(answers) >= 10_000
    results = results_of(answers, timeout_s=20)
    for (name, text), result in zip(answers, results, strict=True):
        # By their rule these two give shares, and `positions` does not mind what follows.
        most = 0.99 if name in ("positions", "reasoning_gym") else 0.0
        if name != "positions" or not text.strip().startswith(TRUTH):
            assert result.score is None or result.score <= most, f"{name}: {text[:200]!r} has score {result.score}"
    statuses = Counter((name, result.status) for (name, _), result in zip(answers, results, strict=True))
    others = {key: count for key, count in statuses.items() if key[1] != "ok"}
    assert set(others) <= {("math", "unreadable")}, others


@pytest.mark.parametrize("tower", ["9^{9^{9^{9}}}", "(10!)!", "2^{2^{2^{2^{2^{2^{2}}}}}}"])
def test_a_tower_of_powers_ends_in_time_and_costs_no_other_answer(tower: str) -> None:
    results = results_of(
        [("math", f"\\boxed{{{tower}}}"), ("math", f"\\boxed{{{TRUTH}}}")], timeout_s=4, function="math"
    )
    assert results[0].score == 0.0 and results[0].status == "unreadable" and results[0].seconds < 3
    assert results[1].score == 1.0


@pytest.mark.skipif(not GSM8K.is_file(), reason="the data set is not here")
def test_reference_solutions_of_word_problems_are_right_and_one_off_is_wrong() -> None:
    answers = [json.loads(line)["answer"] for line in GSM8K.read_text("utf-8").splitlines()]
    truths = [text.rpartition("#### ")[2].replace(",", "") for text in answers]
    wrong = [re.sub(r"#### .*$", f"#### {int(truth) + 1}", text) for text, truth in zip(answers, truths, strict=True)]
    rows = [{"data_source": "gsm8k", "reward_model": {"ground_truth": truth}} for truth in truths]
    results = scored([*answers, *wrong], rows * 2)
    assert results == [RewardResult(1.0, "ok")] * 1319 + [RewardResult(0.0, "ok")] * 1319
