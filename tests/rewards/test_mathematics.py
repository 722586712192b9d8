"""Answers of mathematics have the score of their value, and none of them hangs or breaks the verifier."""

import time
from contextlib import suppress

import pytest
from support_scoring import scored

from rl_core.rewards import mathematics
from rl_core.rewards.answer_text import UnreadableAnswer


def row(truth: str) -> dict[str, object]:
    return {"data_source": "math", "reward_model": {"ground_truth": truth}}


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{1}, no, \boxed{3\sqrt{13}}!", r"3\sqrt{13}", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2,1\}", 1.0),
        (r"\boxed{Evelyn}", r"\text{Evelyn}", 1.0),
        (r"\boxed{18}", r"therefore \boxed{18}", 1.0),
        ("the answer is 7", "7", 1.0),
        ("x" * 5000 + " so $x = 7$", "7", 1.0),
        (r"\boxed{18}, or \boxed{12", "18", 0.0),  # the last box is not closed
        (r"\boxed{12", "1", 0.0),
        (r"\boxed{1, 2, 3}", "1", 0.0),
        (r"\boxed{}", "0", 0.0),
        (r"\boxed{-5}", "5", 0.0),
        ("7" * 5000, "7" * 1000, 0.0),
        ("the answer is 18e1", "18", 0.0),
        ("the answer is 18e-1", "1.8", 1.0),
        ("nothing", "1", 0.0),
        (r"\boxed{2.}", "2", 1.0),
        (r"\boxed{5,}", "5", 1.0),
        (r"\boxed{13~\text{cm}^2}", "13", 1.0),
        (r"\boxed{13\text{ inches}^2}", "13", 1.0),
        (r"\boxed{1\,234}", "1234", 1.0),
        (r"\boxed{1 1/2}", "1.5", 1.0),
        (r"\boxed{1\frac{1}{2}}", "1.5", 1.0),
        (r"\boxed{x=7}", "7", 1.0),
        (r"\boxed{2+3=5}", "5", 1.0),
        (r"\boxed{\cos\theta=\frac12}", "0.5", 1.0),
        (r"\boxed{5=7}", "7", 0.0),
        (r"\boxed{1=2=3}", "3", 0.0),
        (r"the answer is $5=7$", "7", 0.0),
        (r"the answer is 5=7", "7", 0.0),
        (r"\boxed{(1,2)}", r"\{1,2\}", 0.0),
        (r"\boxed{\{1,2\}}", "(1,2)", 0.0),
        (r"\boxed{\left( 1, 2 \right)}", "(1,2)", 1.0),
        (r"\boxed{1,2}", "(1,2)", 1.0),
        (r"\boxed{2,1}", r"\{1,2\}", 1.0),
        (r"\boxed{\neg 5}", "5", 0.0),
        (r"\boxed{\not 5}", "5", 0.0),
        (r"\boxed{\nosuchcommand 5}", "5", 0.0),
        (r"\boxed{5 apples and 7 pears}", "5", 0.0),
        (r"\boxed{5 apples and 7 pears}", "7", 0.0),
        (r"\boxed{5\text{ apples and }7\text{ pears}}", "5", 0.0),
        ("5 apples and 7 pears", "5", 0.0),
        ("5 apples and 7 pears", "7", 0.0),
        (r"\boxed{5\text{ and }7}", "5,7", 1.0),
        (r"\boxed{2 3}", "5", 0.0),
        (r"\boxed{101_2}", "101", 0.0),
        (r"\boxed{101_2}", "101_3", 0.0),
        (r"\boxed{101}", "101_2", 1.0),
        (r"\boxed{pi/2}", r"\frac{\pi}{2}", 1.0),
        (r"\boxed{-2*pi}", r"-2\pi", 1.0),
        (r"\boxed{-2\pi}", "-2*pi", 1.0),
        (r"\boxed{2**10}", "1024", 1.0),
        (r"\boxed{sqrt(2)}", r"\sqrt{2}", 1.0),
        ("the answer is -2*pi", r"-2\pi", 0.0),
        ("**Answer:** 12", "12", 1.0),
        ("in all = 42", "42", 0.0),
        (r"\boxed{2^{100}}", str(2**100), 1.0),
        ("", "1", 0.0),
    ],
)
def test_the_last_box_counts_or_what_is_found_at_the_end(response: str, truth: str, score: float) -> None:
    assert mathematics.boxed(response, row(truth)) == score


def test_what_would_hang_the_verifier_scores_0_with_a_status_of_its_own() -> None:
    responses = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{2}", r"\boxed{1}"]
    results = scored(responses, [row("1")] * 3, function="math", timeout_s=8)
    assert [(result.score, result.status) for result in results] == [(0.0, "unreadable"), (0.0, "ok"), (1.0, "ok")]


HEAVY = [
    "9^{9^{9^{9}}}",
    "9**9**9**9",
    "(10!)!",
    "99999!",
    r"\frac{1}{" * 60 + "2" + "}" * 60,
    "(x+y+z)^{200}",
    "((9^{999})^{999})",
    "(" * 400,
    "(" * 40 + "2" + ")" * 40,
    "x+" * 240 + "1",
    r"\sum_{n=1}^{10^9}n",
    r"\binom{10^9}{5}",
    "eye(99999)",
    r"\sin(" * 8 + "x" + ")" * 8,
    "1e5000",
    "7" * 999,
]


@pytest.mark.parametrize("frame", [r"\boxed{%s}", "the answer is %s", "the answer is $%s$"])
def test_no_answer_takes_longer_than_a_second(frame: str) -> None:
    for answer in HEAVY:
        begin = time.process_time()
        with suppress(UnreadableAnswer):
            assert mathematics.boxed(frame % answer, row("x^2+1")) == 0.0
        assert time.process_time() - begin < 1.0, answer


def test_an_answer_that_takes_too_long_ends_at_its_limit_of_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: object, **__: object) -> list[object]:
        while True:
            with suppress(Exception):  # as in the libraries
                sum(range(1000))

    mathematics.boxed(r"\boxed{2}", row("1"))
    monkeypatch.setattr(mathematics, "parse", endless)
    begin = time.process_time()
    with pytest.raises(UnreadableAnswer, match="more than 0.8 s"):
        mathematics.boxed(r"\boxed{2}", row("1"))
    assert time.process_time() - begin < 1.5


def test_what_the_verifier_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object, **__: object) -> bool:
        raise TypeError("cannot compare")

    monkeypatch.setattr("math_verify.grader.sympy_expr_eq", breaks)
    with pytest.raises(TypeError, match="cannot compare"):
        mathematics.boxed(r"\boxed{2}", row("1"))
