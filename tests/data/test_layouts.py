"""Records of every layout become rows, and what a file of columns adds to them is undone."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_core.config.data import SourceConfig
from rl_core.config.reward import RewardConfig
from rl_core.data.layouts import COLUMNS, check_columns, to_row
from rl_core.data.rows import Row
from rl_core.data.sources import files
from rl_core.errors import InputError
from rl_core.rewards.runner import check_scorers

USER = {"role": "user", "content": "Say yes."}
RULE = {"style": "rule", "ground_truth": "yes"}


def row_of(**record: Any) -> Row:
    return to_row(record, "train", 3, "FILE, row 4")


def through(tmp_path: Path, rows: list[Row], form: str) -> list[Any]:
    """The rows after a round trip through a file."""
    file = tmp_path / f"rows.{form}"
    if form == "parquet":
        names = dict.fromkeys(name for row in rows for name in row)
        pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(files.rows(SourceConfig(source="files", path=str(file), val_path=str(file)), 0)[0])


def schema(name: str, **properties: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": f"{name}s", "parameters": parameters}}


def test_a_row_of_the_field_is_kept_as_it_is(tmp_path: Path) -> None:
    record = {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [{"role": "system", "content": "Use tools."}, USER],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {
            "split": "train",
            "index": 0,
            "answer": "… #### 72",
            "question": "Say yes.",
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "72"}}},
            "interaction_kwargs": {"query": "Say yes."},
        },
    }
    wanted = {name: value for name, value in record.items() if name != "agent_name"}
    for form in ("parquet", "jsonl"):
        assert through(tmp_path, [record], form) == [wanted]
    texts = {name: json.dumps(value) if isinstance(value, list | dict) else value for name, value in record.items()}
    assert through(tmp_path, [texts], "parquet") == [wanted]


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_keys_that_a_column_of_structs_adds_are_gone(tmp_path: Path, form: str) -> None:
    field: Row = {"prompt": [USER], "reward_model": RULE}
    rows: list[Row] = [
        field | {"extra_info": {"tools_kwargs": {"guess": {"create_kwargs": {"secret": 1}}}, "seen": [{"a": 1}]}},
        field
        | {"extra_info": {"tools_kwargs": {"add": {}, "guess": {"execute_kwargs": {"n": 2}}}, "seen": [{"b": 2}]}},
        field | {"extra_info": {"tools_kwargs": {}}, "reward_model": RULE | {"rubric": "be kind"}},
        field | {"prompt": [USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}, USER | {"name": "Ann"}]},
    ]
    # A struct without fields cannot be written.
    rows[0]["extra_info"]["tools_kwargs"]["add"] = {"create_kwargs": {"x": 0}}
    found = through(tmp_path, rows, form)
    for row, record in zip(found, rows, strict=True):
        added = {"split": "train", "index": found.index(row)}
        assert row["extra_info"] == record.get("extra_info", {}) | added
        assert row["reward_model"] == record["reward_model"]
    assert found[3]["prompt"] == [USER, {**rows[3]["prompt"][1], "content": ""}, USER | {"name": "Ann"}]
    assert found[0]["prompt"] == [USER]


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_schemas_choose_the_rows_tools(tmp_path: Path, form: str) -> None:
    field = {"prompt": [USER], "reward_model": RULE, "data_source": "exact"}
    one, other = schema("add", a="integer", b="integer"), schema("search", query="string")
    kwargs = {"add": {"create_kwargs": {"limit": 5}}}
    rows = [
        field | {"tools": [one], "extra_info": {"tools_kwargs": kwargs}},
        field | {"tools": [other, one], "extra_info": {"question": "?"}},
        field | {"tools": []},
        field,
    ]
    with_tools, both, no_tools, free = (row["extra_info"] for row in through(tmp_path, rows, form))
    assert with_tools == {"split": "train", "index": 0, "tools_kwargs": kwargs, "tools": [one]}
    assert both["tools_kwargs"] == {"search": {}, "add": {}} and both["tools"] == [other, one]
    assert no_tools == {"split": "train", "index": 2, "tools_kwargs": {}, "tools": []}
    assert free == {"split": "train", "index": 3}


def test_schemas_may_be_texts_whose_nulls_stay() -> None:
    tool = schema("add", a="integer")
    tool["function"]["parameters"]["properties"]["a"]["default"] = None
    extra = row_of(prompt=[USER], reward_model=RULE, tools=json.dumps([tool]))["extra_info"]
    assert extra["tools"] == [tool] and extra["tools_kwargs"] == {"add": {}}
    text = {**tool, "function": {**tool["function"], "parameters": json.dumps(tool["function"]["parameters"])}}
    assert row_of(prompt=[USER], reward_model=RULE, tools=[text])["extra_info"]["tools"] == [tool]
    kwargs = json.dumps({"add": {"create_kwargs": {"limit": None}}})
    wanted = {"split": "train", "index": 3, "tools_kwargs": json.loads(kwargs)}
    assert (
        row_of(prompt=[USER], reward_model=RULE, extra_info={"tools_kwargs": kwargs, "note": None})["extra_info"]
        == wanted
    )
    extra_text = json.dumps({"tools_kwargs": json.loads(kwargs), "note": None})
    assert row_of(prompt=[USER], reward_model=RULE, extra_info=extra_text)["extra_info"] == wanted | {"note": None}


def test_the_last_message_of_a_conversation_is_the_answer() -> None:
    system, answer, late = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Yes."}, USER
    row = row_of(messages=[system, USER, answer])
    assert row == {
        "data_source": "files",
        "prompt": [system, USER],
        "ability": "",
        "reward_model": {"style": "rule", "ground_truth": "Yes."},
        "extra_info": {"split": "train", "answer": "Yes.", "index": 3},
    }
    assert row_of(messages=json.dumps([system, USER, answer])) == row
    judged = row_of(messages=[USER, answer], reward_model=RULE, data_source="exact")
    assert judged["reward_model"] == RULE and judged["extra_info"]["answer"] == "Yes." and judged["prompt"] == [USER]
    # A turn of the user that waits for its answer belongs to the prompt, when the row says what is right.
    asked = row_of(messages=[USER, answer, late], reward_model=RULE)
    assert asked["prompt"] == [USER, answer, late] and "answer" not in asked["extra_info"]
    assert row_of(messages=[USER, answer, late])["prompt"] == [USER]


@pytest.mark.parametrize(
    ("record", "question", "truth", "answer"),
    [
        ({"question": "2 + 2?", "answer": "It is #### 4"}, "2 + 2?", "It is #### 4", "It is #### 4"),
        ({"problem": "2 + 2?", "solution": "So \\boxed{4}."}, "2 + 2?", "4", "So \\boxed{4}."),
        ({"problem": "2 + 2?", "answer": 4, "solution": "Count."}, "2 + 2?", "4", "Count."),
        ({"problem": "2 + 2?", "answer": None, "solution": "Four."}, "2 + 2?", "Four.", "Four."),
        ({"instruction": "Add.", "input": "2 2", "output": "4"}, "Add.\n\n2 2", "4", "4"),
        ({"instruction": "Add 2 2.", "input": "", "output": "4"}, "Add 2 2.", "4", "4"),
        ({"prompt": "2 + 2?", "completion": "4"}, "2 + 2?", "4", "4"),
        ({"prompt": "[1, 2] has length?", "response": True}, "[1, 2] has length?", "True", "True"),
        ({"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}, "2 + 2?", "4", "4"),
        ({"problem": "2 + 2?", "answer": "4", "messages": [USER]}, "2 + 2?", "4", "4"),
    ],
)
def test_a_question_and_its_answer_are_a_row(record: Row, question: str, truth: str, answer: str) -> None:
    assert row_of(**record, ability="adding") == {
        "data_source": "files",
        "prompt": [{"role": "user", "content": question}],
        "ability": "adding",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "answer": answer, "index": 3},
    }


ASSISTANT = {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"prompt": [USER]}, "prompt and reward_model, question and answer.*\n.*columns found: prompt"),
        ({"text": "a"}, "messages\n.*columns found: text"),
        ({"prompt": [USER], "reward_model": "text"}, "reward_model.ground_truth"),
        ({"prompt": [USER], "reward_model": {"ground_truth": {"a": 1}}}, "structured answers belong in extra_info"),
        ({"messages": [USER]}, "an assistant message, as in the layout messages"),
        ({"messages": [ASSISTANT]}, "messages before the answer\n.*an empty list"),
        ({"messages": "hello"}, "list of messages in messages\n.*hello"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "the last assistant message"),
        ({"question": " ", "answer": "4"}, "a string in question, as in the layout question and answer"),
        ({"question": "?", "answer": ["4"]}, "a string or number in answer, as in"),
        ({"prompt": 3, "completion": "4"}, "a string in prompt, as in the layout prompt and completion"),
        ({"messages": [USER, ASSISTANT], "data_source": 5}, "data_source"),
        ({"messages": [USER, ASSISTANT], "extra_info": "[1]"}, "a struct in extra_info"),
        ({"messages": [USER, ASSISTANT], "extra_info": {"tools_kwargs": [1]}}, "a struct in tools_kwargs"),
        ({"messages": [USER, ASSISTANT], "extra_info": {"tools_kwargs": {"add": 1}}}, "extra_info.tools_kwargs.add"),
        ({"messages": [USER, ASSISTANT], "tools": "add"}, "list of schemas"),
        ({"messages": [USER, ASSISTANT], "tools": [{"name": "add"}]}, "type: function"),
        (
            {"messages": [USER, ASSISTANT], "tools": [schema("add")], "extra_info": {"tools_kwargs": {"ad": {}}}},
            "names among the row's tools add\n.*'ad'",
        ),
    ],
)
def test_what_is_wrong_with_a_record_is_said(record: Row, says: str) -> None:
    with pytest.raises(InputError, match=says) as error:
        row_of(**record)
    assert error.value.where == "FILE, row 4"


def test_columns_of_a_file_are_checked_before_its_rows() -> None:
    check_columns({"messages", "more"}, "FILE", ["more"])
    with pytest.raises(InputError, match="no such columns.*columns found: text"):
        check_columns({"text"}, "FILE")


def test_rows_without_a_source_need_a_scorer_for_all() -> None:
    row = row_of(question="2 + 2?", answer=4)
    with pytest.raises(InputError, match="rows without a data_source.*\n.*\n.*Set reward.function"):
        check_scorers(RewardConfig(), {row["data_source"]: "row 1"})
    check_scorers(RewardConfig(function="numeric"), {row["data_source"]: "row 1"})


KEYS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=4).filter(lambda key: key not in COLUMNS)
LEAVES = st.sampled_from(
    [st.text(st.characters(codec="utf-8"), max_size=5), st.booleans(), st.integers(-9, 9), st.floats(-9, 9)]
)
TYPED: st.SearchStrategy[st.SearchStrategy[Any]] = st.recursive(
    LEAVES,
    lambda kinds: st.one_of(
        kinds.map(lambda kind: st.lists(kind, max_size=3)),
        st.dictionaries(KEYS, kinds, min_size=1, max_size=3).map(
            lambda kinds: st.fixed_dictionaries({}, optional=kinds)
        ),
    ),
    max_leaves=6,
)
"""Strategies of values of one type, whose structs lack any of their keys."""


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_rows_come_out_of_parquet_as_out_of_json_lines(tmp_path: Path, data: st.DataObject) -> None:
    kinds = data.draw(st.dictionaries(KEYS, TYPED, max_size=3))
    extras = st.fixed_dictionaries({}, optional=kinds)
    optional = {"extra_info": extras, "ability": st.just("talk"), "data_source": st.just("exact")}
    record = st.fixed_dictionaries({"prompt": st.just([USER]), "reward_model": st.just(RULE)}, optional=optional)
    rows = data.draw(st.lists(record, min_size=1, max_size=4))
    try:
        found = through(tmp_path, rows, "parquet")
    except pa.ArrowNotImplementedError:  # a struct that no row gives a key
        return
    assert found == through(tmp_path, rows, "jsonl")
