"""What a policy gets that always gives the same answer."""

import pytest
from support_data import row

from rl_core.config.compose import compose
from rl_core.data.rows import Row
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
