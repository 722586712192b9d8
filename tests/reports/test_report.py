import io
import math
import re
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support_pages import Page

from rl_core.config.reward import CodeConfig
from rl_core.reports.report import MAX_SAMPLES, render_report, scoring_rows

RUN = {
    "name": "demo-1", "recipe": "demo", "model": "tiny", "steps": 5, "seconds": 92.0, "config_hash": "c0ffee",
    "versions": {"torch": "2.13"}, "config": [("actor.optim.lr", 0.0005, "recipe demo")],
}  # fmt: skip
SUMMARY = {"greedy_before": 0.5, "greedy_after": 0.984, "sampled_before": 0.4, "sampled_after": 0.35}
METRICS = {
    "score/mean": 0.4, "reward/mean": 0.3, "reward/min": 0.0, "reward/max": 1.0, "kl/rollout_k3": 1e-7,
    "kl/rollout_k1": -1e-7, "kl/ref": 0.1, "actor/entropy": 0.3, "response_length/mean": 5.9, "actor/grad_norm": 0.6,
    "actor/lr": 5e-4, "perf/tokens_per_s": 5210.0, "time/rollout": 0.4, "time/score": 0.1, "time/log_prob": 0.1,
    "time/update": 0.2, "time/push": 0.1, "time/commit": 0.1,
}  # fmt: skip
TITLES = [
    "Score and reward", "Rollout–trainer mismatch", "KL to the reference", "Entropy", "Response length",
    "Gradient norm", "Learning rate", "Throughput", "Time per phase",
]  # fmt: skip


def records(count: int, without: tuple[str, ...] = (), **changed: Any) -> list[dict[str, Any]]:
    metrics = {k: v for k, v in {**METRICS, **changed}.items() if k not in without}
    return [{"step": s, "time": 0.0, "metrics": {k: v * (1 + s / count) for k, v in metrics.items()}}
            for s in range(1, count + 1)]  # fmt: skip


def sample(**changed: Any) -> dict[str, Any]:
    return {"prompt": "Sort: 3 1 2", "ground_truth": "1 2 3", "answer_before": "3 1 2", "answer_after": "1 2 3",
            "score_before": 0.0, "score_after": 1.0, **changed}  # fmt: skip


def headings(html: str) -> list[str]:
    return re.findall(r"<h3>(.*?)</h3>", html)[2:]


def test_page_tells_everything_once() -> None:
    html = render_report(RUN, records(5), [sample()], SUMMARY)
    page = Page(html)
    assert headings(html) == TITLES and page.count("svg") == len(TITLES)
    for words in ("demo-1", "50.0 % →", "98.4 %", "▲ 48.4 points", "▼ 5.0 points", "1m32s", "c0ffee", "torch 2.13",
                  "0.48 → 0.8", "actor.optim.lr", "0.0005", "recipe demo", "log prob"):  # fmt: skip
        assert words in page.text, words
    assert {"answer wrong", "answer right"} <= {a.get("class") for _, a in page.tags}


def test_programs_without_isolation_are_among_the_facts() -> None:
    risk = CodeConfig(isolation="none").risk
    text = Page(render_report({**RUN, "programs": risk}, records(5), [sample()], SUMMARY)).text
    assert "Programs written by the model are not isolated (reward.code.isolation=none)" in text
    assert "isolated" not in Page(render_report({**RUN, "programs": CodeConfig().risk}, [], [], SUMMARY)).text


def test_page_needs_nothing_from_outside() -> None:
    html = render_report(RUN, records(5), [sample()], SUMMARY)
    assert not re.search(r"https?://|\ssrc\s*=|@import|url\((?!#)", html)
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    references = [v for _, attrs in page.tags for k, v in attrs.items() if k.endswith("href")]
    assert all(v is not None and v.startswith("#") for v in references)


def test_hostile_text_is_shown_and_never_run() -> None:
    attack = "</div></table><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}"
    hidden = "a\u202eb\x00c\x1b[31m\ud800d"
    run = {**RUN, "name": attack, "config": [("a.b", attack, attack)]}
    texts = {k: attack for k in ("prompt", "ground_truth", "answer_after")}
    html = render_report(run, records(3), [sample(**texts, answer_before=hidden)], SUMMARY)
    page = Page(html)
    assert page.count("script") == 0 and page.count("img") == 0
    assert page.text.count(attack) == 8
    assert "a\ufffdb\ufffdc\ufffd[31m\ufffdd" in page.text
    html.encode("utf-8")


def test_missing_series_are_left_out() -> None:
    gone = ("kl/ref", "actor/entropy", "kl/rollout_k1")
    html = render_report(RUN, records(5, without=gone), [], SUMMARY)
    assert headings(html) == [t for t in TITLES if t not in ("KL to the reference", "Entropy")]
    not_finite: dict[str, Any] = {"actor/entropy": math.nan, "kl/ref": math.inf}
    nan = render_report(RUN, records(5, **not_finite), [], SUMMARY)
    assert headings(nan) == headings(html)
    no_times = render_report(RUN, records(5, without=tuple(k for k in METRICS if k.startswith("time/"))), [], SUMMARY)
    assert headings(no_times) == TITLES[:-1]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_records_and_nothing_else(count: int) -> None:
    html = render_report({"name": "x"}, records(count), [], {})
    page = Page(html)
    assert page.count("svg") == (len(TITLES) if count else 0)
    assert "Samples" not in page.text and "Settings" not in page.text and "score" not in page.text.split("Training")[0]


def test_conversations_have_charts_of_turns_and_of_what_failed() -> None:
    talks: dict[str, Any] = {
        "turns/mean": 2.0,
        "tools/calls_mean": 1.0,
        "tools/failed_share": 0.5,
        "rollout/failed_share": 0.0,
    }
    html = render_report(RUN, records(5, **talks), [], SUMMARY)
    assert set(headings(html)) - set(TITLES) == {"Turns and calls", "Failures"}


def test_one_gap_in_a_series_does_not_hide_it() -> None:
    some = records(9)
    some[4]["metrics"]["reward/mean"] = math.nan
    html = render_report(RUN, some, [], SUMMARY)
    assert headings(html) == TITLES and "NaN" not in html and "nan" not in Page(html).text.replace("nats", "")


def test_long_runs_and_long_answers_stay_small() -> None:
    html = render_report(RUN, records(20_000), [sample(answer_after="x" * 1_000_000)] * 30, SUMMARY)
    assert len(html) < 1_500_000
    page = Page(html)
    assert page.count("tr") == 1 + MAX_SAMPLES + 2 and "10 more samples not shown" in page.text
    assert "998,000 more characters" in page.text


def test_many_phases_become_other() -> None:
    extra: dict[str, Any] = {f"time/extra{i}": 0.001 for i in range(6)}
    html = render_report(RUN, records(3, **extra), [], SUMMARY)
    legend = re.findall(r"</i>(.*?)</span>", html)
    assert legend[-8:] == ["rollout", "score", "log prob", "update", "push", "commit", "extra5", "other"]


def test_scores_that_are_no_shares_and_answers_without_score() -> None:
    html = render_report(RUN, [], [sample(score_before=None, answer_before=None, score_after=0.5)], {
        "greedy_before": None, "greedy_after": 0.9, "sampled_before": -1.5, "sampled_after": 2.25,
    })  # fmt: skip
    text = " ".join(Page(html).text.split())
    assert "Greedy score 90.0 %" in text and "-1.500 → 2.250 ▲ 3.750" in text
    assert "≈ 0.5" in text and "–" in text
    html = render_report(RUN, [], [], {"greedy_before": -0.6, "greedy_after": 0.4})
    assert "-0.600 → 0.400 ▲ 1.000" in " ".join(Page(html).text.split()), "both in one unit"


def test_scoring_is_told_by_source() -> None:
    def step(*rows: tuple[str, str, float]) -> bytes:
        buffer = io.BytesIO()
        names = ["data_source", "score_status", "score_seconds"]
        pq.write_table(pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))), buffer)
        return buffer.getvalue()

    steps = [
        step(("math", "ok", 0.5), ("<code>", "timeout", 10.0)),
        step(("math", "error", 0.1), ("<code>", "ok", 2.0), ("math", "ok", 0.3)),
    ]
    rows = scoring_rows(steps, "here")
    assert rows[1] == {
        "data_source": "math", "responses": 3, "seconds_mean": pytest.approx(0.3), "seconds_max": 0.5,
        "failed": {"error": 1},
    }  # fmt: skip
    cells = re.findall(r"<td>(.*?)</td>", render_report(RUN, [], [], SUMMARY, rows))
    assert cells[:10] == ["&lt;code&gt;", "2", "6", "10", "1 timeout", "math", "3", "0.3", "0.5", "1 error"]
    assert scoring_rows([], "here") == [] and "Scoring" not in render_report(RUN, [], [], SUMMARY)
