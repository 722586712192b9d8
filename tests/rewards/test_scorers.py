import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import InputError
from rl_core.rewards.scorers import SCORERS, exact, gsm8k, numeric, positions, resolve_scorer


def row(truth: str) -> dict[str, object]:
    return {"data_source": "x", "reward_model": {"ground_truth": truth}}


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("so 18 in all.\n#### 18", "18"),
        ("####18", "18"),
        ("#### 18.0", "18"),
        ("#### 18", "18.00"),
        ("#### 18.", "18"),
        ("#### $18.50.", "18.5"),
        ("#### 1,234,567", "1234567"),
        ("#### 1,234.5 dollars", "1,234.5"),
        ("#### -5", "-5"),
        ("#### \u22125", "-5"),
        ("#### +5", "5"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### 50%", "50"),
        ("#### .5", "0.5"),
        ("#### 007", "7"),
        ("#### 3, or 4 with the cat", "3"),
        ("#### 3,4", "3"),
        ("#### 5 is wrong\n#### 18 apples, not 20", "18"),
        ("#### **18**", "18"),
        ("x" * 5000 + "\n#### 18", "18"),
        ("#### 18\x00\ud800", "18"),
        ("#### 1.8e1", "18"),
        ("#### 18", "$18"),
    ],
)
def test_gsm8k_reads_the_number_after_the_last_mark(response: str, truth: str) -> None:
    assert gsm8k(response, row(truth)) == 1.0


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("18", "18"),
        ("### 18", "18"),
        ("#### ", "18"),
        ("#### none", "18"),
        ("#### 18\n####", "18"),
        ("#### 18 " + "x" * 2000, "18"),
        ("#### -18", "18"),
        ("#### 1,8", "18"),
        ("#### 1,2345", "1234"),
        ("#### 180", "18"),
        ("#### 18.01", "18"),
        ("#### 18e1", "18"),
        ("#### 18e999999999", "18"),
        ("#### 0.1000000000000000055511151231257827", "0.1"),
        ("", "18"),
    ],
)
def test_gsm8k_gives_nothing_for_another_answer_or_none(response: str, truth: str) -> None:
    assert gsm8k(response, row(truth)) == 0.0


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("first 3, then 7.", "7", 1.0),
        ("it is 3-5", "5", 1.0),
        ("it is -5", "-5", 1.0),
        ("(-5)", "-5", 1.0),
        ("first 7, then 3", "7", 0.0),
        ("seven", "7", 0.0),
        ("5" * 999 + "7", "7", 0.0),
        ("5" * 5000 + "7", "7", 0.0),
        ("18" + " " * 999, "8", 0.0),  # only the 8 is in the window
    ],
)
def test_numeric_compares_the_last_number(response: str, truth: str, score: float) -> None:
    assert numeric(response, row(truth)) == score


def test_a_ground_truth_without_a_number_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="not a number"):
        gsm8k("#### 3", row("three"))


def test_exact_ignores_white_space_only() -> None:
    assert exact(" 1  2\n3 ", row("1 2 3")) == 1.0
    assert exact("123", row("1 2 3")) == 1.0
    assert exact("1 2 3 4", row("1 2 3")) == 0.0


@pytest.mark.parametrize(
    ("response", "score"),
    [("1 2 3 4", 1.0), ("1 2 4 3", 0.5), ("0 1 2 3", 0.0), ("1 2", 0.5), ("1 2 3 4 5", 1.0), ("1234", 1.0), ("", 0.0)],
)
def test_positions_gives_the_share_of_characters_in_their_place(response: str, score: float) -> None:
    assert positions(response, row("1 2 3 4")) == score


@given(st.sampled_from(sorted(SCORERS)), st.text(st.characters(exclude_categories=[])))
def test_no_text_breaks_a_scorer(name: str, response: str) -> None:
    assert SCORERS[name](response, row("1")) in (0.0, 1.0)


@pytest.mark.parametrize("name", sorted(SCORERS))
@pytest.mark.parametrize("piece", ["9", "1,", "#", "-", "$-", "1,111", ".1", "#### 1,"])
def test_long_text_is_scored_quickly(name: str, piece: str) -> None:
    start = time.process_time()
    SCORERS[name](piece * (1_000_000 // len(piece)), row("1"))
    assert time.process_time() - start < 0.5


def test_names_of_scorers_sources_and_functions_resolve() -> None:
    assert resolve_scorer("numeric") is numeric
    assert resolve_scorer("gsm8k") is gsm8k
    assert resolve_scorer("sort_digits") is exact
    assert resolve_scorer("scorers_for_tests:process").__name__ == "process"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("exakt", "did you mean exact"),
        ("sort_digit", "did you mean sort_digits"),
        ("zzz", "exact, .*numeric, gsm8k, .*sort_digits\\) or package"),
        ("files", "a scorer .none"),  # its rows name their own
        ("absent_package:score", "No module named 'absent_package'"),
        ("scorers_for_tests:absent", "no attribute 'absent'"),
        ("scorers_for_tests:not_a_function", "is a int"),
        (":score", "package.module:function"),
    ],
)
def test_an_unknown_name_says_what_there_is(name: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        resolve_scorer(name)


def test_scoring_imports_nothing_heavy() -> None:
    program = (
        "import sys, rl_core.rewards.worker; from rl_core.rewards.scorers import resolve_scorer\n"
        "resolve_scorer('sort_digits'); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "ray"} & set(done.stdout.split())
