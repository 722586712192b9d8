import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_data import row
from transformers import PreTrainedTokenizerBase

from rl_core.config.data import DataConfig
from rl_core.config.reward import RewardConfig
from rl_core.data import check
from rl_core.data.check import CheckRow, Dropped, check_data
from rl_core.data.dataset import ToolsOf, without_tools
from rl_core.data.page import render_data_report
from rl_core.data.report import DataReport
from rl_core.data.row_counts import MAX_NAMES, OTHERS, Hashes, Names
from rl_core.data.sources import files
from rl_core.errors import InputError
from rl_core.rewards.row_check import RowCheck
from rl_core.rollout.agent.toolbox import row_schemas

Rows = list[dict[str, Any]]
CALCULATOR = {"type": "function", "function": {"name": "calculator", "parameters": {"properties": {"x": {}}}}}


class Checked:
    """A look at rows: the report, what stays of each split, what is dropped and what was said meanwhile."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        tools_of: ToolsOf,
        check_row: CheckRow = lambda row, where: None,
    ) -> None:
        self.kept: dict[str, list[str]] = {"train": [], "val": []}
        self.dropped: list[Dropped] = []
        self.report = check_data(
            config, 0, tokenizer, tools_of, self._keep, check_row=check_row, on_drop=self.dropped.append
        )

    def _keep(self, split: str, row: dict[str, Any], tokens: int) -> None:
        self.kept[split].append(row["prompt"][-1]["content"])

    @property
    def problems(self) -> list[tuple[str, str, str]]:
        return [(problem.level, problem.where, problem.seen) for problem in self.report.problems]


Look = Callable[..., Checked]


@pytest.fixture
def look(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Look:
    """Looks at files with the given rows."""

    def make(
        train: Rows,
        val: Rows,
        tools_of: ToolsOf = without_tools,
        check_row: CheckRow = lambda row, where: None,
        **data: Any,
    ) -> Checked:
        paths = {}
        for name, rows in (("path", train), ("val_path", val)):
            paths[name] = str(tmp_path / f"{name}.jsonl")
            Path(paths[name]).write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = DataConfig.model_validate({"source": "files", "train_batch_size": 1, **paths, **data})
        return Checked(config, tokenizer, tools_of, check_row)

    return make


def test_the_report_of_a_small_set_says_what_is_in_it(look: Look) -> None:
    two = [{"role": "system", "content": "12"}, {"role": "user", "content": "3"}]
    found = look([row("1"), row("22", ability="a"), row("333", prompt=two, data_source="math"), row("1")], [row("9")])
    train = found.report.of("train")[0]
    assert (train.seen, train.kept, train.faults, train.missing_truth) == (4, 4, {"duplicate": 1}, 0)
    assert train.examples == {"duplicate": "train row 4: the prompt of an earlier row"}
    assert train.turns == {1: 3, 2: 1} and train.tools == train.unknown_tools == {}
    assert train.data_sources == {"exact": 3, "math": 1} and found.report.data_sources == {"exact": 4, "math": 1}
    lengths = train.lengths
    assert lengths and (lengths.minimum, lengths.maximum, lengths.median, lengths.p95) == (4, 8, 4, 8)
    assert (lengths.mean, lengths.bin_width, lengths.bins) == (5.25, 1, (2, 1, 0, 0, 1))
    assert train.columns["prompt"] == {"list": 4} and train.columns["reward_model.ground_truth"] == {"text": 4}
    assert train.columns["extra_info.index"] == {"number": 4}
    first = train.samples[0]
    assert (first.data_source, first.prompt, first.ground_truth, len(train.samples)) == ("exact", "user: 1", "1", 3)
    assert found.report.problems == () and found.report.complete and found.kept["train"] == ["1", "22", "3", "1"]
    assert DataReport.from_json(json.loads(json.dumps(found.report.as_json()))) == found.report


def test_a_column_that_some_rows_lack_is_counted_as_missing(look: Look) -> None:
    train = look([row("1"), row("2", extra_info={"note": "x"}), row("3", extra_info={"note": 7})], [row("9")]).report
    assert train.of("train")[0].columns["extra_info.note"] == {"text": 1, "number": 1, "null": 1}


@pytest.mark.parametrize(
    ("bad", "reason", "seen"),
    [
        (row("1", reward_model={}), "malformed", "{}"),
        (row(" \n", reward_model={"ground_truth": "1"}), "malformed", "only blank messages"),
        (row("123456789"), "overlong", "12 tokens"),
        (row("99"), "held_out", "the prompt of val row 1"),
    ],
)
def test_a_bad_row_stops_the_run_or_is_dropped_and_told(look: Look, bad: Any, reason: str, seen: str) -> None:
    rows, val = [row("1"), bad, row("2")], [row("99")]
    stopped = look(rows, val, max_prompt_length=10)
    [problem] = stopped.report.stops
    assert seen in problem.seen and "row 2" in problem.where and f"data.drop=[{reason}]" in problem.fix
    assert stopped.kept["train"] == ["1"] and stopped.report.of("train")[0].faults == {reason: 1}
    dropping = look(rows, val, max_prompt_length=10, drop=(reason,), max_dropped_share=0.5)
    assert dropping.report.problems == () and dropping.kept["train"] == ["1", "2"]
    [dropped] = dropping.dropped
    assert (dropped.split, dropped.reason) == ("train", reason) and seen in dropped.detail and "row 2" in dropped.where
    assert dropping.report.dropped("train") == {reason: 1}


def test_the_fix_of_overlong_prompts_lets_all_of_them_in(look: Look) -> None:
    [problem] = look([row("12345"), row("1234567890"), row("123456")], [row("9")], max_prompt_length=4).report.stops
    assert (problem.rows, problem.seen, problem.where) == (3, "8 tokens", "train row 1")
    assert "data.max_prompt_length=13" in problem.fix


def test_duplicates_are_only_dropped_when_that_is_asked_for(look: Look) -> None:
    rows, val = [row("1"), row("2"), row("1"), row("1")], [row("8"), row("8"), row("9")]
    assert look(rows, val).kept == {"train": ["1", "2", "1", "1"], "val": ["8", "8", "9"]}
    dropping = look(rows, val, drop=("duplicate",), max_dropped_share=1.0)
    assert dropping.kept == {"train": ["1", "2"], "val": ["8", "9"]}
    assert [(each.where, each.detail) for each in dropping.dropped] == [
        ("val row 2", "the prompt of val row 1"),
        ("train row 3", "the prompt of an earlier row"),
        ("train row 4", "the prompt of an earlier row"),
    ]


def test_one_prompt_with_other_secrets_of_a_tool_is_another_problem(look: Look) -> None:
    def secret(number: int) -> dict[str, Any]:
        return row("guess", extra_info={"tools_kwargs": {"guess": {"create_kwargs": {"secret": number}}}})

    report = look([secret(1), secret(2), secret(2)], [secret(3)]).report
    assert report.of("train")[0].faults == {"duplicate": 1} and report.stops == []


def test_rows_are_judged_by_their_scorers(look: Look) -> None:
    """A broken ground truth can be dropped; a row without a scorer always stops the run."""
    judge = RowCheck(RewardConfig())
    rows = [row("1"), row("2", data_source="numeric", reward_model={"ground_truth": "5 of 8"})]
    [problem] = look(rows, [row("9")], check_row=judge).report.stops
    assert (problem.where, "data.drop=[malformed]" in problem.fix) == ("train row 2", True)
    assert (
        "'5 of 8' is not one number" in problem.seen and problem.expected == "a ground truth for the scorer `numeric`"
    )
    dropping: dict[str, Any] = {"drop": ("malformed",), "max_dropped_share": 0.5}
    assert look(rows, [row("9")], check_row=judge, **dropping).kept["train"] == ["1"]
    for source in ("unheard_of", "builtins:eval", "judge"):
        rows = [row("1"), row("2", data_source=source), row("3", data_source=source)]
        [problem] = look(rows, [row("9")], check_row=judge, **dropping).report.stops
        assert problem.rows == 2 and "data.drop" not in problem.fix
        assert "train row 2" in problem.where or source == "judge"


def test_more_dropped_rows_than_allowed_stop_the_run(look: Look) -> None:
    rows = [row(str(i)) for i in range(8)] + [row("123456789"), row("0")]
    dropping: dict[str, Any] = {"max_prompt_length": 10, "drop": ("overlong", "duplicate")}
    assert look(rows, [row("9")], max_dropped_share=0.2, **dropping).report.stops == []
    [problem] = look(rows, [row("9")], **dropping).report.stops
    assert problem.seen == "2 of 10 dropped: overlong 1, duplicate 1"
    assert problem.expected.startswith("at most 10% of the train rows") and "data.max_dropped_share=0.2" in problem.fix


def test_a_source_of_a_mixture_needs_training_rows(look: Look, tmp_path: Path, tokenizer: Any) -> None:
    look([row("123456789")], [row("9")])
    files = {"source": "files", "path": str(tmp_path / "path.jsonl"), "val_path": str(tmp_path / "val_path.jsonl")}
    made = {"source": "sort_digits", "train_rows": 40, "val_rows": 1}
    settings = {"mixture": [made, files], "train_batch_size": 1, "max_prompt_length": 10, "drop": ["overlong"]}
    found = Checked(DataConfig.model_validate_json(json.dumps(settings)), tokenizer, without_tools)
    assert ("stop", "files", "1 row, all dropped") in found.problems
    assert [(rows.split, rows.source, rows.seen) for rows in found.report.rows] == [
        ("val", "sort_digits", 1), ("val", "files", 1), ("train", "sort_digits", 40), ("train", "files", 1),
    ]  # fmt: skip
    assert found.report.of("train")[1].examples["overlong"].startswith("train (files) row 1")


def test_tools_that_there_are_not_stop_and_other_schemas_warn(look: Look) -> None:
    def calling(name: str, **more: Any) -> dict[str, Any]:
        return row(name, extra_info={"tools_kwargs": {name: {}}, **more})

    other = {"type": "function", "function": {"name": "calculator", "parameters": {"properties": {"y": {}}}}}
    rows = [calling("calculator", tools=[other]), calling("calculater"), calling("calculator", tools=[CALCULATOR])]
    found = look(rows, [row("9")], row_schemas([CALCULATOR]))
    train = found.report.of("train")[0]
    assert train.tools == {"calculator": 2, "calculater": 1} and train.unknown_tools == {"calculater": 1}
    assert found.problems == [
        ("warning", "train row 1", "other parameters in the row: missing x; extra y"),
        ("stop", "extra_info.tools_kwargs of train row 2", "'calculater'"),
    ]
    assert "calculator" in found.report.stops[0].fix and "data.drop" not in found.report.stops[0].fix


def test_tools_of_rows_without_any_configured_warn(look: Look) -> None:
    [problem] = look([row("1", extra_info={"tools_kwargs": {"calculator": {}}})], [row("9")]).problems
    assert problem == ("warning", "train row 1", "calculator")


def test_a_file_that_is_damaged_is_a_problem_and_the_other_is_looked_at(look: Look, tmp_path: Path) -> None:
    (tmp_path / "damaged.parquet").write_bytes(b"cut short")
    found = look([row("1")], [row("2")], val_path=str(tmp_path / "damaged.parquet"))
    [problem] = found.report.stops
    assert "damaged.parquet" in problem.where and not found.report.complete and found.report.seen("train") == 1


def test_the_look_ends_early_when_many_rows_stop_the_run(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MAX_STOPPING_ROWS", 5)
    report = look([row(f"{i}2345678") for i in range(20)], [row("9")], max_prompt_length=5).report
    assert report.seen("train") == 5 and not report.complete and [problem.rows for problem in report.stops] == [5]


def test_the_look_ends_at_the_given_number_of_rows_good_or_bad(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = InputError("a row", "none", "row", "correct it")
    monkeypatch.setattr(files, "rows", lambda config, seed: (iter([bad, *[row(str(i)) for i in range(9)]]), [row("9")]))
    config = DataConfig(source="files", path="a", val_path="b", train_batch_size=1)
    report = check_data(config, 0, tokenizer, without_tools, lambda split, row, tokens: None, max_rows=4)
    assert report.seen("val") == 1 and report.seen("train") == 3 and not report.complete
    assert [problem.seen for problem in report.stops] == ["none"]
    exact = check_data(config, 0, tokenizer, without_tools, lambda split, row, tokens: None, max_rows=11)
    assert exact.complete


def test_progress_is_told_now_and_then(look: Look, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "PROGRESS_S", 0.0)
    told: list[int] = []
    config = DataConfig(train_rows=3, val_rows=1)
    check_data(config, 0, tokenizer, without_tools, lambda split, row, tokens: None, on_rows=told.append)
    assert told == [1, 2, 3, 4]


def test_values_that_json_lacks_are_malformed(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "rows", lambda config, seed: ([row("1", extra_info={"when": b"x"})], [row("9")]))
    found = Checked(DataConfig(source="files", path="a", val_path="b", train_batch_size=1), tokenizer, without_tools)
    assert ("stop", "train row 1", "Object of type bytes is not JSON serializable") in found.problems


def test_hostile_texts_break_neither_file_nor_page(look: Look) -> None:
    evil = "<script>alert(1)</script>\ud800\0\x1b[31m\u202e"
    rows = [row(evil, data_source=evil, extra_info={evil: evil}), row("2", reward_model={"ground_truth": [evil]})]
    report = look(rows, [row("9")]).report
    json.dumps(report.as_json(), ensure_ascii=False).encode()
    page = render_data_report(report, evil)
    page.encode()
    assert "<script" not in page and "&lt;script&gt;" in page
    assert not set("\0\x1b\u202e") & set(page) and "Blocks a run" in page


def test_the_page_shows_counts_lengths_problems_and_rows(look: Look) -> None:
    report = look([row("1"), row("123456789"), row("1")], [row("9")], max_prompt_length=10).report
    page = render_data_report(report, "mine")
    for text in ("Rows of mine", "12 tokens", "data.drop=[overlong]", "user: 123456789", "extra_info.index", "dashed"):
        assert text in page
    assert page.count("<svg") == 2 and "://" not in page


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 20), max_size=60))
def test_hashes_know_what_they_have_seen(numbers: list[int]) -> None:
    seen, ours = set(), Hashes()
    for number in numbers:
        assert ours.add(number) == (number not in seen)
        seen.add(number)


def test_many_hashes_take_little_memory_and_none_is_forgotten() -> None:
    stream = random.Random(0)
    numbers = [stream.getrandbits(56) for _ in range(5000)]  # all of one bucket, which is sorted in several times
    ours = Hashes()
    assert all(ours.add(number) for number in numbers) and not any(ours.add(number) for number in numbers)
    assert sum(map(len, ours._recent)) < 1024


def test_names_without_end_are_counted_together() -> None:
    names = Names()
    for i in range(MAX_NAMES + 50):
        names.count(str(i))
    assert len(names) == MAX_NAMES + 1 and names[OTHERS] == 50
