import json
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import InputError
from rl_core.rewards.scorers import (
    SCORERS,
    BrokenTruth,
    check_truth,
    exact,
    gsm8k,
    numeric,
    positions,
    resolve_scorer,
)

GSM8K = Path(__file__).parents[3] / "shared/data/gsm8k/train.jsonl"


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
        ("#### 18 " + "x" * 2000, "18"),
        ("#### 18" + "." * 2000, "18"),
        ("#### 3/4", "0.75"),
        ("#### 0.75", "3/4"),
        ("#### 6/8", "3/4"),
        ("#### -3 1/2 hours", "-3.5"),
        ("#### 1,500/2", "750"),
        ("#### 50%", "0.5"),
        ("#### 50", "50%"),
        ("#### 0.5", "50%"),
        ("#### 12.50\\%", "12.5%"),
        ("#### 13 cm^2", "13"),
        ("#### $5/hour", "5"),
        ("#### Answer:18", "18"),
        ("#### -1234567890123456789012345678901", "-1234567890123456789012345678901"),
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
        ("#### -18", "18"),
        ("#### 1,8", "18"),
        ("#### 1,2345", "1234"),
        ("#### 180", "18"),
        ("#### 18.01", "18"),
        ("#### 18e1", "18"),
        ("#### 18e999999999", "18"),
        ("#### 0.1000000000000000055511151231257827", "0.1"),
        ("", "18"),
        ("#### 4", "3/4"),
        ("#### 3", "3/4"),
        ("#### 2", "1 1/2"),
        ("#### 5000%", "50%"),
        ("#### 10^3", "10"),
        ("#### 10**3", "10"),
        ("#### 12:30", "12"),
        ("#### 3/4/2025", "3"),
        ("#### 1/0", "1"),
        ("#### 3.5/7", "3.5"),
        ("#### -1e-999999999", "0"),
        ("#### -1e999999999", "18"),
        ("#### 1e" + "9" * 900, "18"),
        ("#### " + "9" * 5000, "9" * 999),
        ("#### -1234567890123456789012345678901", "-1234567890123456789012345678999"),
        ("#### 0.33333333333333333333", "1/3"),
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
        ("x = 3/4", "4", 0.0),
        ("x = 3/4", "0.75", 1.0),
        ("it is 10^3", "3", 0.0),
        ("it is x/2", "2", 0.0),
        ("it is 12:30", "30", 0.0),
        ("an area of 13 cm^2", "13", 1.0),
        ("about 1 1/2 cups", "1.5", 1.0),
        ("-1e999999999", "7", 0.0),
    ],
)
def test_numeric_compares_the_last_number(response: str, truth: str, score: float) -> None:
    assert numeric(response, row(truth)) == score


@pytest.mark.parametrize(
    "truth",
    [
        "three",
        "5 of 8",
        "3-5",
        "10:30",
        "10^3",
        "2*3",
        "1/0",
        "1/2/3",
        "3,4",
        "12,34",
        "1e500",
        "18 apples",
        "",
        "x",
        "\u0663",
    ],
)
def test_a_ground_truth_that_is_not_one_number_is_an_error_not_a_zero(truth: str) -> None:
    for scorer in (gsm8k, numeric):
        with pytest.raises(BrokenTruth, match="not one number"):
            scorer("#### 3", row(truth))
    with pytest.raises(BrokenTruth, match="not one number"):
        check_truth("numeric", row(truth))


@pytest.mark.parametrize(
    "truth", ["1/2", "-1/2", "1 1/2", "50%", "1,234.5", "+5", ".5", "-$5", " 18. ", "1e3", "\u22125"]
)
def test_a_ground_truth_that_is_one_number_in_another_form_is_accepted(truth: str) -> None:
    check_truth("numeric", row(truth))


@given(st.fractions(), st.fractions())
def test_fractions_are_compared_exactly(one: Fraction, other: Fraction) -> None:
    assert gsm8k(f"#### {one}", row(str(other))) == float(one == other)
    assert numeric(f"{other}", row(f"{other}")) == 1.0


@pytest.mark.skipif(not GSM8K.is_file(), reason="the data set is not here")
def test_every_ground_truth_of_gsm8k_is_a_number() -> None:
    for line in GSM8K.read_text("utf-8").splitlines():
        check_truth("gsm8k", row(json.loads(line)["answer"].rpartition("####")[2].strip()))


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
        ("total", "fix: Set reward.function"),  # no name is near
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
