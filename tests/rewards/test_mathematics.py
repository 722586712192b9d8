"""Answers of mathematics have the score of their value, and what breaks the verifier is no zero."""

import pytest
from support_scoring import scored

from rl_core.rewards import mathematics


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
        ("", "1", 0.0),
    ],
)
def test_the_last_box_counts_or_what_is_found_at_the_end(response: str, truth: str, score: float) -> None:
    assert mathematics.boxed(response, row(truth)) == score


def test_what_hangs_or_breaks_the_verifier_is_a_failure_and_not_a_zero() -> None:
    responses = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{2}", r"\boxed{1}"]
    results = scored(responses, [row("1")] * 3, function="math", timeout_s=8)
    assert [(result.score, result.status) for result in results] == [(None, "timeout"), (0.0, "ok"), (1.0, "ok")]


def test_what_the_verifier_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object, **__: object) -> bool:
        raise TypeError("cannot compare")

    monkeypatch.setattr("math_verify.grader.sympy_expr_eq", breaks)
    with pytest.raises(TypeError, match="cannot compare"):
        mathematics.boxed(r"\boxed{2}", row("1"))
