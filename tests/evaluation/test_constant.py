"""What a policy gets that always gives the same answer."""

import time

import pytest
from support_data import row

from rl_core.config.compose import compose
from rl_core.data.rows import Row
from rl_core.evaluation import constant
from rl_core.evaluation.constant import constant_score


def rows(*truths: str) -> list[Row]:
    return [row(str(i), reward_model={"ground_truth": truth}) for i, truth in enumerate(truths)]


@pytest.mark.parametrize(
    ("scorer", "truths", "wanted"),
    [
        ("exact", ["yes", "no", "yes", "yes"], 0.75),
        ("positions", ["1234", "1299", "1255"], 2 / 3),
        ("gsm8k", ["7", "7", "8"], 2 / 3),
        ("numeric", ["1", "2", "3", "4"], 0.25),
    ],
)
def test_it_is_the_score_of_the_best_answer_for_all_rows(scorer: str, truths: list[str], wanted: float) -> None:
    found = constant_score(compose("grpo", [f"reward.function={scorer}"]).config, rows(*truths))
    assert found == pytest.approx(wanted)


def test_it_is_computed_on_rows_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constant, "MAX_ROWS", 4)
    found = constant_score(compose("grpo", ["reward.function=exact"]).config, rows(*["1"] * 4, *["2"] * 5))
    assert found == pytest.approx(2 / 3), "rows 1, 4 and 7"


def test_users_scorers_score_fewer_rows_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    own = compose("grpo", ["reward.function=scorers_for_tests:by_response", "reward.processes=1"]).config
    monkeypatch.setattr(constant, "MAX_OWN_ROWS", 2)
    assert constant_score(own, rows(*["1", "nan"] * 2)) == 0.5, "rows 1 and 3"
    monkeypatch.setattr(constant, "MAX_S", 0.5)
    begin = time.monotonic()
    assert constant_score(own, rows("hang", "hang")) is None and time.monotonic() - begin < 9


@pytest.mark.parametrize(
    "settings",
    [
        ["agent.tools=[calculator]"],
        ["reward.model.path=/models/judge"],
        ["reward.function=judge", "reward.judge={url: http://127.0.0.1:1/v1, model: m}"],
        ["reward.function=code"],
        ["reward.function=scorers_for_tests:by_response"],
    ],
)
def test_it_is_unknown_if_scorers_alone_do_not_say_it(settings: list[str]) -> None:
    truths = ["text", "nan"] if "by_response" in settings[0] else ["1", "2"]
    assert constant_score(compose("grpo", settings).config, rows(*truths)) is None
