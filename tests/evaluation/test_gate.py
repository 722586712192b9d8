"""The gate's decision, and how often it is wrong."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from support_gate import evaluation
from support_pages import page

from benchmarks.gate import Case, share_promoted
from rl_core.config.gate import GateConfig
from rl_core.errors import InputError
from rl_core.evaluation.gate import Decision, decide

BAD, GOOD = [1.0] * 60 + [0.0] * 40, [1.0] * 80 + [0.0] * 20
FINE = {"log_prob_difference": 1e-6, "greedy_gap": 0.0, "tolerance": 1e-3}


def failed(decision: Decision) -> list[str]:
    return [check.name for check in decision.checks if not check.passed]


def test_a_better_version_is_promoted_and_every_check_is_listed() -> None:
    decision = decide(evaluation(GOOD), evaluation(BAD), {}, GateConfig(), FINE)
    assert decision.promote and failed(decision) == []
    names = ["better", "chance", "length", "format", "refusal"]
    assert [check.name for check in decision.checks] == [*names, "reload, log prob difference", "reload, greedy gap"]
    better = decision.checks[0]
    assert better.value == pytest.approx(0.2) and better.low is not None and 0.1 < better.low < 0.2
    assert "0.800, champion 0.600 on 100 rows; difference +0.200, 90% interval" in better.words
    assert json.loads(json.dumps(decision.as_json()))["checks"][0]["name"] == "better"


def test_every_line_has_its_limit_in_brackets() -> None:
    guarded = GateConfig(min_score=0.0, max_kl=1.0, min_entropy=0.5)
    lines = decide(evaluation(GOOD), evaluation(BAD), {"kl/ref": 0.25}, guarded, FINE).words
    assert [line for line in lines if not re.search(r"\((minimum|maximum|limit) [-+.e\d]+\)$", line)] == []
    assert lines[0] == "✓ floor: greedy score 0.800 (minimum 0.000)"
    assert lines[2] == "✓ chance: greedy score 0.800, champion 0.600; p = 0.000 under equal models (limit 0.050)"
    assert lines[-4:] == [
        "✓ KL: mean kl/ref of the last steps 0.25 (maximum 1)",
        "✗ entropy: actor/entropy was not measured (minimum 0.5)",
        "✓ reload, log prob difference: log-probs differ by at most 1.0e-06 (limit 1.0e-03)",
        "✓ reload, greedy gap: greedy gap 0.0 (limit 2.0e-03)",
    ]


def test_a_worse_or_equal_version_is_refused_and_later_checks_are_still_made() -> None:
    refused = decide(evaluation(BAD), evaluation(GOOD), {"kl/ref": 9.0}, GateConfig(max_kl=1.0), FINE)
    assert not refused.promote and failed(refused) == ["better", "chance", "KL"]
    assert failed(decide(evaluation(GOOD), evaluation(GOOD), {}, GateConfig())) == ["better", "chance"]


def test_the_first_version_needs_the_floor_only() -> None:
    assert decide(evaluation(BAD), None, {}, GateConfig(min_score=0.6)).promote
    assert failed(decide(evaluation(BAD), None, {}, GateConfig(min_score=0.61))) == ["floor"]


@pytest.mark.parametrize(
    ("constant", "config", "passes"),
    [
        (0.59, {}, True),
        (0.6, {}, False),
        (None, {}, False),
        (0.6, {"min_score": 0.6}, True),
        (None, {"min_score": 0.6}, True),
    ],
)
def test_the_first_version_must_beat_a_constant_answer_or_the_minimum_that_is_set(
    constant: float | None, config: dict[str, float], passes: bool
) -> None:
    decision = decide(evaluation(BAD), None, {}, GateConfig(**config), FINE, constant)
    assert decision.promote == passes
    assert failed(decision) == ([] if passes else ["constant"]) and decision.awaits_approval == (not passes)
    words = decide(evaluation(BAD), None, {}, GateConfig(), None, constant).words[0]
    assert ("gate.min_score is required" in words) if constant is None else words.endswith(f"(limit {constant:.3f})")
    assert "constant" not in [
        check.name for check in decide(evaluation(GOOD), evaluation(BAD), {}, GateConfig()).checks
    ]
    broken = decide(evaluation([0.0] * 9), None, {}, GateConfig(), {"problem": "exit code 1"}, 0.0)
    assert not broken.awaits_approval, "no approval for what fails another check"


def test_few_rows_that_differ_are_no_proof() -> None:
    # The bootstrap alone would take three rows for certain: it hardly ever draws none of them.
    three = [1.0] * 3 + [0.0] * 97
    assert failed(decide(evaluation(three), evaluation([0.0] * 100), {}, GateConfig())) == ["chance"]


def test_a_gain_is_judged_at_the_one_sided_level() -> None:
    """40 rows won and 25 lost of 1,000: p = 0.041 and a lower bound above 0 at 5 %, but not at 2.5 %."""
    ours, theirs = [1.0] * 40 + [0.0] * 25 + [1.0] * 935, [0.0] * 40 + [1.0] * 25 + [1.0] * 935
    assert decide(evaluation(ours), evaluation(theirs), {}, GateConfig()).promote
    assert failed(decide(evaluation(ours), evaluation(theirs), {}, GateConfig(alpha=0.025))) == ["better", "chance"]


def test_guards_are_judged_at_the_one_sided_level() -> None:
    """39 of 1,000 answers are cut off: the drop is within 0.05 at 5 %, but not shown to be at 2.5 %."""
    ours = evaluation([1.0] * 1000, ended=[False] * 39 + [True] * 961)
    theirs = evaluation([0.0] * 1000)
    assert decide(ours, theirs, {}, GateConfig()).promote
    assert failed(decide(ours, theirs, {}, GateConfig(alpha=0.025))) == ["format"]
    assert failed(decide(evaluation([1.0] * 1000, ended=[False] * 42 + [True] * 958), theirs, {}, GateConfig())) == [
        "format"
    ]


def test_the_gain_must_be_above_the_minimum_effect() -> None:
    assert failed(decide(evaluation(GOOD), evaluation(BAD), {}, GateConfig(min_effect=0.15))) == ["better"]
    assert decide(evaluation(GOOD), evaluation(BAD), {}, GateConfig(min_effect=0.1)).promote


def test_the_sampled_score_is_compared_row_by_row() -> None:
    ours = evaluation([0.0] * 40, sampled=[[1.0, 1.0, 0.0, 0.0]] * 40)
    theirs = evaluation([0.0] * 40, sampled=[[1.0, 0.0, 0.0, 0.0]] * 40)
    assert decide(ours, theirs, {}, GateConfig(metric="sampled")).promote
    assert not decide(ours, theirs, {}, GateConfig(metric="greedy")).promote


@pytest.mark.parametrize(
    ("name", "seen", "off"),
    [
        ("length", {"length": [25.0] * 100}, "max_length_ratio"),
        ("format", {"ended": [True] * 90 + [False] * 10}, "max_format_drop"),
        ("refusal", {"refused": [True] * 10 + [False] * 90}, "max_refusal_rise"),
    ],
)
def test_what_was_not_asked_for_must_not_get_worse(name: str, seen: dict[str, Any], off: str) -> None:
    ours, theirs = evaluation(GOOD, **seen), evaluation(BAD)
    assert failed(decide(ours, theirs, {}, GateConfig())) == [name]
    assert name not in [check.name for check in decide(ours, theirs, {}, GateConfig(**{off: None})).checks]
    assert decide(evaluation(GOOD), evaluation(BAD, **seen), {}, GateConfig()).promote, "getting better is fine"


def test_too_few_rows_do_not_show_that_nothing_was_lost() -> None:
    cut, other = [False] * 2 + [True] * 18, [True] * 18 + [False] * 2
    ours, theirs = evaluation([1.0] * 20, ended=cut), evaluation([0.0] * 20, ended=other)
    assert failed(decide(ours, theirs, {}, GateConfig())) == ["format"]
    assert decide(ours, theirs, {}, GateConfig(max_format_drop=0.3)).promote


def test_no_source_may_pay_for_another() -> None:
    sources = ["easy"] * 50 + ["hard"] * 50
    theirs = evaluation([0.0] * 50 + [1.0] * 50, source=sources)
    ours = evaluation([1.0] * 50 + [1.0] * 30 + [0.0] * 20, source=sources)
    assert failed(decide(ours, theirs, {}, GateConfig())) == ["source hard"]
    assert decide(ours, theirs, {}, GateConfig(max_source_drop=None)).promote


@pytest.mark.parametrize(
    ("setting", "metric", "fine", "bad"),
    [
        ("max_kl", "kl/ref", 0.9, 1.1),
        ("min_entropy", "actor/entropy", 1.1, 0.9),
        ("max_mismatch", "kl/rollout_k3", 0.9, 1.1),
    ],
)
def test_training_guards_stop_what_was_trained_badly(setting: str, metric: str, fine: float, bad: float) -> None:
    config = GateConfig(**{setting: 1.0})
    assert decide(evaluation(GOOD), None, {metric: fine}, config, constant=0.1).promote
    assert not decide(evaluation(GOOD), None, {metric: bad}, config, constant=0.1).promote
    assert "was not measured" in decide(evaluation(GOOD), None, {}, config).checks[-1].words


@pytest.mark.parametrize(
    "found",
    [
        {"problem": "exit code 1"},
        FINE | {"log_prob_difference": 2e-3},
        FINE | {"greedy_gap": 3e-3},
        FINE | {"greedy_gap": float("nan")},
    ],
)
def test_a_version_that_does_not_come_back_as_it_was_is_refused(found: dict[str, Any]) -> None:
    decision = decide(evaluation(GOOD), None, {}, GateConfig(), found, constant=0.1)
    assert not decision.promote and all(name.startswith("reload") for name in failed(decision))


def test_a_champion_without_a_score_and_other_rows_are_told() -> None:
    assert failed(decide(evaluation(GOOD), {"problem": "its context is too short"}, {}, GateConfig())) == ["champion"]
    with pytest.raises(InputError, match="same held-out rows"):
        decide(evaluation(GOOD), evaluation(BAD) | {"data": "other"}, {}, GateConfig())


def test_off_decides_nothing_and_a_dry_run_decides_alike() -> None:
    assert decide(evaluation(GOOD), None, {}, GateConfig(mode="off")) == Decision(False, "off", ())
    enforced = decide(evaluation(GOOD), evaluation(BAD), {}, GateConfig())
    assert (
        replace(decide(evaluation(GOOD), evaluation(BAD), {}, GateConfig(mode="dry_run")), mode="enforce") == enforced
    )


@pytest.mark.parametrize(("graded", "rows"), [(False, 64), (True, 64), (True, 200)])
def test_equally_good_versions_are_seldom_promoted_and_better_ones_are_found(graded: bool, rows: int) -> None:
    runs = 200  # of a true rate of 5 %, more than 9 % are seen in one of a hundred such samples
    assert share_promoted(Case(rows, 0.0, graded), runs, seed=1) <= 0.09
    assert share_promoted(Case(rows, 0.25, graded), runs, seed=2) >= (0.7 if rows == 64 else 0.99)


def test_the_page_has_every_setting_check_and_key() -> None:
    text = page("promotion")
    assert [name for name in GateConfig.model_fields if f"`gate.{name}`" not in text] == []
    sources = ["a"] * 50 + ["b"] * 50
    guarded = GateConfig(max_kl=1.0, min_entropy=1.0, max_mismatch=1.0)
    every = decide(evaluation(GOOD, source=sources), evaluation(BAD, source=sources), {}, guarded, FINE).checks
    names = {check.name.split()[0].strip(",") for check in every}
    assert {name for name in names if f"| `{name}" not in text} == set()
    assert {key for key in evaluation(GOOD) if f"`{key}`" not in text} == set()
