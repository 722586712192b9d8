import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_core.config.schema import DataConfig
from rl_core.data.sources import copy_digits, files, gsm8k, last_digit, load_source, math, sort_digits, source_names
from rl_core.errors import InputError

Read = tuple[list[Any], list[Any]]
LAYOUT = {"data_source", "prompt", "ability", "reward_model", "extra_info"}


def read(source: Any, config: DataConfig) -> Read:
    train, val = source.rows(config, seed=0)
    return list(train), list(val)


def test_sources_are_found_by_name() -> None:
    names = "arithmetic copy_digits files gsm8k last_digit math reasoning_gym sort_digits"
    assert source_names() == names.split()
    assert load_source("sort_digits").SCORER == "exact"
    with pytest.raises(InputError, match="data.source=sort_digits"):
        load_source("sort_digit")


def test_sorted_digits_have_the_layout_and_the_answer() -> None:
    train, val = sort_digits.rows(DataConfig(source="sort_digits", difficulty=5), seed=0)
    assert (len(train), len(val)) == (4096, 256)
    row = val[3]
    assert set(row) == LAYOUT
    digits = row["prompt"][0]["content"].split(" ")
    assert row["reward_model"] == {"style": "rule", "ground_truth": "".join(sorted(digits))}
    assert row["extra_info"] == {"split": "val", "index": 3, "answer": "".join(sorted(digits))}
    assert sort_digits.reference_response(row) == "".join(sorted(digits))
    assert len(digits) == 5


@pytest.mark.parametrize(
    ("name", "scorer", "answer"),
    [("copy_digits", "positions", "201"), ("last_digit", "exact", "1"), ("sort_digits", "exact", "012")],
)
def test_digit_sources_differ_in_the_answer_alone(name: str, scorer: str, answer: str) -> None:
    source, config = load_source(name), DataConfig(source=name, difficulty=3, val_rows=50)
    assert scorer == source.SCORER
    splits: Any = source.rows(config, 2)
    lines = [[row["prompt"] for row in rows] for rows in splits]
    assert lines == [[row["prompt"] for row in rows] for rows in sort_digits.rows(config, 2)]
    row = next(row for row in splits[0] if row["prompt"][0]["content"] == "2 0 1")
    assert row["data_source"] == name and row["reward_model"]["ground_truth"] == answer
    assert source.reference_response(row) == row["extra_info"]["answer"] == answer


@pytest.mark.parametrize("source", [copy_digits, last_digit])
def test_no_held_out_line_is_trained_in_another_order(source: Any) -> None:
    train, val = source.rows(DataConfig(difficulty=4), 1)
    trained, held_out = (
        {"".join(sorted(row["prompt"][0]["content"].replace(" ", ""))) for row in rows} for rows in (train, val)
    )
    assert trained and held_out and not trained & held_out


@pytest.mark.parametrize("difficulty", [3, 5])
def test_no_answer_of_a_held_out_problem_is_trained(difficulty: int) -> None:
    train, val = sort_digits.rows(DataConfig(difficulty=difficulty, val_rows=60), seed=1)
    trained, held_out = ({row["reward_model"]["ground_truth"] for row in rows} for rows in (train, val))
    assert trained and held_out and not trained & held_out
    assert len({row["prompt"][0]["content"] for row in val}) == 60


def test_sorted_digits_follow_the_seed_alone() -> None:
    config = DataConfig(train_rows=20, val_rows=10)
    first = sort_digits.rows(config, seed=3)
    assert sort_digits.rows(config, seed=3) == first
    assert sort_digits.rows(config, seed=4) != first
    assert sort_digits.rows(DataConfig(train_rows=30, val_rows=10), seed=3)[1] == first[1]


def test_the_last_held_out_problem_is_found_and_one_more_is_an_error() -> None:
    with pytest.raises(InputError, match="set data.val_rows=") as error:
        sort_digits.rows(DataConfig(difficulty=2, val_rows=101, train_rows=1), seed=0)
    most = int(error.value.expected.split()[2])
    assert len(sort_digits.rows(DataConfig(difficulty=2, val_rows=most, train_rows=1), seed=0)[1]) == most
    with pytest.raises(InputError):
        sort_digits.rows(DataConfig(difficulty=2, val_rows=most + 1, train_rows=1), seed=0)


def problems(split: str, count: int) -> list[dict[str, str]]:
    return [
        {"question": f"{split}: what is {i} thousand and one?", "answer": f"Add <<1+{i}>> one.\n#### {i},001"}
        for i in range(1, count + 1)
    ]


def write_lines(file: Path, rows: list[Any]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("layout", ["train.jsonl", "train.parquet", "train-00000-of-00002.parquet"])
def test_word_problems_are_read_from_each_layout(tmp_path: Path, layout: str) -> None:
    rows = problems("train", 4)
    if layout.endswith(".jsonl"):
        write_lines(tmp_path / layout, rows)
    elif "-" in layout:
        pq.write_table(pa.Table.from_pylist(rows[:3]), tmp_path / layout)
        pq.write_table(pa.Table.from_pylist(rows[3:]), tmp_path / "train-00001-of-00002.parquet")
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / layout)
    write_lines(tmp_path / "test.jsonl", problems("test", 3))
    train, val = read(gsm8k, DataConfig(path=(str(tmp_path),), val_rows=2))
    assert (len(train), len(val)) == (4, 2)
    assert set(train[3]) == LAYOUT
    assert train[3]["prompt"][0]["content"].startswith("train: what is 4 thousand and one?\n")
    assert train[3]["reward_model"]["ground_truth"] == "4001"
    assert gsm8k.reference_response(train[3]) == "Add <<1+4>> one.\n#### 4,001"
    assert val[0]["extra_info"]["split"] == "val"


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"question": "What?", "answer": "no number"}, "row 2"),
        ({"question": "What?", "answer": "no number\n#### "}, "row 2"),
        ({"text": "What?"}, "columns .'text'."),
        (["a list"], "line 2"),
    ],
)
def test_a_word_problem_of_another_form_is_named(tmp_path: Path, bad: Any, says: str) -> None:
    write_lines(tmp_path / "train.jsonl", [*problems("train", 1), bad])
    write_lines(tmp_path / "test.jsonl", problems("test", 1))
    first, problem = read(gsm8k, DataConfig(path=str(tmp_path)))[0]
    assert first["extra_info"]["index"] == 0
    assert isinstance(problem, InputError) and re.search(says, str(problem))


def test_missing_word_problems_say_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="set data.path to the folder"):
        gsm8k.rows(DataConfig(path=str(tmp_path / "absent")), seed=0)
    write_lines(tmp_path / "train.jsonl", problems("train", 1))
    with pytest.raises(InputError, match="test.jsonl, test.parquet"):
        gsm8k.rows(DataConfig(path=str(tmp_path)), seed=0)


def test_the_hub_out_of_reach_says_to_give_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gsm8k, "DEFAULT_PATH", "unknown-protocol://datasets")
    with pytest.raises(InputError, match="data.path=FOLDER"):
        gsm8k.rows(DataConfig(), seed=0)


def test_competition_problems_have_the_answer_of_their_last_box(tmp_path: Path) -> None:
    boxed = "First \\boxed{1}, and so \\boxed{\\frac{1}{2}}."
    records = [
        {"problem": "Half?", "solution": boxed, "level": "Level 1"},
        {"problem": "Seven?", "answer": 7},
        {"problem": "Other?", "solution": boxed, "answer": "0.5"},
    ]
    write_lines(tmp_path / "train.jsonl", records)
    write_lines(tmp_path / "test.jsonl", records[:1])
    train, val = read(math, DataConfig(path=f"{tmp_path}/"))
    assert set(train[0]) == LAYOUT and train[0]["prompt"][0]["content"].startswith("Half?\n")
    assert [row["reward_model"]["ground_truth"] for row in train] == ["\\frac{1}{2}", "7", "0.5"]
    assert [math.reference_response(row) for row in train] == [boxed, "\\boxed{7}", "\\boxed{0.5}"]
    assert val[0]["data_source"] == "math" and val[0]["extra_info"]["split"] == "val"


@pytest.mark.parametrize("bad", [{"problem": "?", "solution": "no box"}, {"question": "?", "answer": "1"}])
def test_a_competition_problem_of_another_form_is_named(tmp_path: Path, bad: dict[str, str]) -> None:
    write_lines(tmp_path / "train.jsonl", [{"problem": "?", "answer": "1"}, bad])
    write_lines(tmp_path / "test.jsonl", [{"problem": "?", "answer": "1"}])
    problem = read(math, DataConfig(path=str(tmp_path)))[0][1]
    assert isinstance(problem, InputError) and problem.where == f"{tmp_path}/train.jsonl, row 2"
    with pytest.raises(InputError, match="data.path=FOLDER"):
        math.rows(DataConfig(), seed=0)


@pytest.mark.parametrize("source", [gsm8k, math])
def test_data_sets_of_a_folder_take_one_folder(source: Any) -> None:
    with pytest.raises(InputError, match="a single folder"):
        source.rows(DataConfig(path=("/one", "/two")), seed=0)


def own_row(**changes: Any) -> dict[str, Any]:
    row = {
        "data_source": "exact",
        "prompt": [{"role": "user", "content": "Say yes."}],
        "reward_model": {"style": "rule", "ground_truth": "yes"},
    }
    return row | changes


def own_config(folder: Path, rows: list[dict[str, Any]]) -> DataConfig:
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist([own_row(ability="held out")]), folder / "val.parquet")
    return DataConfig(source="files", path=str(folder / "train.parquet"), val_path=str(folder / "val.parquet"))


def test_own_rows_are_read_and_filled_in(tmp_path: Path) -> None:
    full = own_row(extra_info={"split": "mine", "index": 7, "answer": "Yes, yes."}, ability="talk", more=5)
    config = own_config(tmp_path, [full, full | {"extra_info": None}])
    train, val = read(files, config)
    kept = {"split": "mine", "index": 0, "own_index": 7, "answer": "Yes, yes."}
    assert train[0] == {key: value for key, value in full.items() if key != "more"} | {"extra_info": kept}
    assert files.reference_response(train[0]) == "Yes, yes."
    assert train[1]["extra_info"] == {"split": "train", "index": 1}
    assert files.reference_response(train[1]) == "yes"
    more = config.model_copy(update={"columns": ("more",), "val_path": config.path})
    assert read(files, more)[0][0]["more"] == 5
    assert val[0]["ability"] == "held out" and val[0]["extra_info"] == {"split": "val", "index": 0}


def test_a_ground_truth_number_becomes_text(tmp_path: Path) -> None:
    train, _ = read(files, own_config(tmp_path, [own_row(reward_model={"ground_truth": 18})]))
    assert train[0]["reward_model"] == {"style": "rule", "ground_truth": "18"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt": []}, "non-empty list of messages"),
        ({"prompt": "Say yes."}, "non-empty list of messages"),
        ({"prompt": [{"role": "user", "text": "x"}]}, "role, content"),
        ({"prompt": [{"role": "user", "content": ""}]}, "role, content"),
        ({"reward_model": {"style": "rule"}}, "ground_truth"),
        ({"reward_model": {"ground_truth": float("nan")}}, "ground_truth"),
        ({"reward_model": {"ground_truth": ["a", "b"]}}, "extra_info"),
        ({"data_source": ""}, "data_source"),
        ({"extra_info": "text"}, "extra_info"),
    ],
)
def test_an_own_row_of_another_form_is_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    [problem] = read(files, own_config(tmp_path, [own_row(**changes)]))[0]
    assert isinstance(problem, InputError) and re.search(says, str(problem))
    assert problem.where == f"{tmp_path}/train.parquet, row 1"


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    row = own_row()
    with pytest.raises(InputError, match="no column levle; columns found: data_source"):
        read(files, own_config(tmp_path, [row]).model_copy(update={"columns": ("levle",)}))
    del row["reward_model"]
    with pytest.raises(InputError, match="prompt and reward_model.*\n.*columns found: data_source, prompt\n"):
        read(files, own_config(tmp_path, [row]))


def test_the_first_rows_are_kept_and_no_others_read(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [own_row(), own_row(), "no row"])
    paths = {"path": f"{tmp_path}/train.jsonl", "val_path": f"{tmp_path}/*.jsonl"}
    train, val = read(files, DataConfig(source="files", train_rows=2, **paths))
    assert [row["extra_info"] for row in train] == [{"split": "train", "index": 0}, {"split": "train", "index": 1}]
    assert [type(found) for found in val] == [dict, dict, InputError]


def test_missing_empty_and_foreign_files_are_input_errors(tmp_path: Path) -> None:
    config = own_config(tmp_path, [own_row()])
    file = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([own_row()])[:0], file)
    with pytest.raises(InputError, match="an empty file"):
        read(files, config)
    for content in (b"", b"question,answer\n"):
        file.write_bytes(content)
        with pytest.raises(InputError, match="a valid parquet file"):
            read(files, config)
    file.unlink()
    with pytest.raises(InputError, match="no such file"):
        files.rows(config, seed=0)
    file.mkdir()
    with pytest.raises(InputError, match="a folder without such files"):
        files.rows(config, seed=0)
    with pytest.raises(InputError, match="data.val_path"):
        files.rows(DataConfig(source="files", path=str(file)), seed=0)
