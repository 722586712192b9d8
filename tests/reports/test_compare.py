import math
from typing import Any

from support_pages import Page

from rl_core.config.compose import compose
from rl_core.reports.compare import Side, metric_rows, render_comparison, score_rows, setting_rows


def side(name: str, *overrides: str, steps: int = 3, **metrics: Any) -> Side:
    values = {"reward/mean": 0.5, "time/step": 30.0, **metrics}
    records = [{"step": step, "metrics": {k: v * step for k, v in values.items()}} for step in range(1, steps + 1)]
    return Side(name, compose("demo", overrides).config, {"greedy": 0.5}, steps, records)


def test_a_metric_that_one_run_lacks_and_equal_settings_are_left_out() -> None:
    kl: dict[str, Any] = {"kl/ref": 0.1}
    lacking: dict[str, Any] = {"kl/ref": math.nan}
    first, second = side("a", **kl), side("b", "actor.optim.lr=0.1", **lacking, steps=2)
    assert metric_rows(first, second) == [("reward/mean", "0.5 → 1.5", "0.5 → 1")]
    assert [row[0] for row in setting_rows(first, second)] == ["actor.optim.lr"]
    assert setting_rows(first, first) == []
    assert score_rows(first, second)[:2] == [("steps", "3", "2"), ("time of the steps", "3m00s", "1m30s")]


def test_names_and_values_are_text_on_the_page() -> None:
    page = Page(render_comparison(side("<b>x</b>"), side("b", steps=0)))
    assert page.count("b") == 0 and "<b>x</b>" in page.text and page.count("svg") == 0
    assert "None: both runs use the same settings." in page.text
