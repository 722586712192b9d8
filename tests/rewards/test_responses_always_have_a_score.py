"""Twenty thousand scores of nasty responses by all built-in scorers: none raises or takes a second."""

import json
import time
from collections import Counter
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_core.data.rows import canonical
from rl_core.rewards import worker
from rl_core.rewards.code import last_block
from rl_core.rewards.scorers import LAZY, NAMED_REWARDS, SCORERS, Row
from rl_core.rewards.worker import score_chunk

NASTY = [
    "-1e999999999", "1e5000", "-1e-999999999", "1e" + "9" * 400, "9**9**9**9", "9^{9^{9^{9}}}", "(10!)!", "99999!",
    "(x+y+z)^{200}", "((9^{999})^{999})", "5=7", "1=2=3", "(1,2)", r"\{1,2\}", r"\neg 5", "5 apples and 7 pears", "1/0",
    "3/4", "1 1/2", "50%", r"50\%", "1,234", "12:30", "10^3", "-", "+", "\u2212", "$", "$$", "#### ", "####", ".", ",",
    r"\frac{1}{" * 60, r"\frac", r"\sqrt{", r"\left(", r"\text{", r"\begin{pmatrix}", r"\int", r"\sum_{n=1}^{99}", "x",
    r"\binom{10^9}{5}", "eye(99999)", r"\infty", "nan", "inf", "zoo", "pi", "(", ")", "{", "}", "[", "]", "!", "^", "_",
    "&", "|", "~", "=", "<", r"\in", r"\cup", "i", "e", "0", "7", "1" * 400, "answer", "the answer is ", "<answer>",
    "</answer>", "```", "```python\n", "\n```\n", "\n", " ", "\0", "\ud800", "\u202e", "\\", r"\boxed{", "}" * 50,
    "(" * 50,
]  # fmt: skip
FRAMES = ["{}", "#### {}", "\\boxed{{{}}}", "the answer is {}", "the answer is ${}$", "<answer>{}</answer>"]
responses = st.builds(
    lambda frame, parts: frame.format("".join(parts)),
    st.sampled_from(FRAMES),
    st.lists(st.sampled_from(NASTY) | st.text(st.characters(exclude_categories=[]), max_size=8), max_size=8),
)
NAMES = [name for name in (*SCORERS, *LAZY) if name != "judge"]
RESPONSES = 3500
"""Each is scored by all scorers: 20,000 scores without those of the optional package reasoning-gym."""


def row(name: str) -> Row:
    truth = json.dumps({"tests": ["assert False"]}) if name == "code" else "1729"
    entry = canonical({"answer": "1729", "question": "?", "metadata": {}})
    extra = {"task": "leg_counting", "entry": entry}
    return {"data_source": name, "reward_model": {"ground_truth": truth}, "extra_info": extra}


def test_a_response_always_has_a_score_within_a_second() -> None:
    names = [name for name in NAMES if name != "reasoning_gym" or find_spec("reasoning_gym")]
    statuses: Counter[tuple[str, str]] = Counter()
    for name in names:
        score_chunk([(name, "1729", row(name), None)], 60)  # loads the modules

    @settings(max_examples=RESPONSES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(responses)
    def scores(response: str) -> None:
        for name in names:
            if name == "code" and last_block(response) is not None:
                continue  # a program takes the time that its row allows it
            begin = time.process_time()
            [result] = score_chunk([(name, response, row(name), None)], 60)
            assert time.process_time() - begin < 1.0, name
            assert result.score is not None and 0 <= result.score <= 1, (name, result)
            assert set(result.named) == set(NAMED_REWARDS.get(name, ()))
            statuses[name, result.status] += 1

    scores()
    assert sum(statuses.values()) >= 20_000
    assert {status for name, status in statuses} <= {"ok", "unreadable"}
    assert {name for name, status in statuses if status == "unreadable"} <= {"math"}


def test_an_error_of_a_built_in_scorer_is_a_score_of_0_with_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (RecursionError("deep"), MemoryError(), OverflowError("large"), SystemExit(3)):

        def breaks(response: str, row: Row, error: BaseException = error) -> float:
            raise error

        for name in ("numeric", "code"):
            monkeypatch.setattr(worker, "resolve_scorer", lambda name, breaks=breaks: breaks)
            [result] = score_chunk([(name, "1", row(name), None)], 60)
            assert (result.score, result.status) == (0.0, "unreadable") and type(error).__name__ in result.detail
            assert set(result.named) == set(NAMED_REWARDS.get(name, ()))


def test_a_broken_ground_truth_is_no_score_of_0() -> None:
    for name in ("numeric", "gsm8k", "code", *["reasoning_gym"] * bool(find_spec("reasoning_gym"))):
        broken = {**row(name), "reward_model": {"ground_truth": "5 of 8"}, "extra_info": {}}
        [result] = score_chunk([(name, "5", broken, None)], 60)
        assert (result.score, result.status) == (None, "invalid") and "BrokenTruth" in result.detail
