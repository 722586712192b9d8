"""Converts records of common data layouts to rows.

A layout is detected by its columns. The standard RL layout has a `prompt` of messages and a `reward_model` with the
ground truth; others have a conversation in `messages`, or a question and its answer in two columns.
"""

from collections.abc import Collection
from typing import Any

from rl_core.data.boxed import last_box
from rl_core.data.json_columns import parsed, plain
from rl_core.data.rows import Row
from rl_core.data.sources import NO_SOURCE
from rl_core.errors import InputError

Layout = tuple[str, ...]
_FIELD: Layout = ("prompt", "reward_model")
_CHAT: Layout = ("messages",)
_PAIRS: tuple[Layout, ...] = (
    ("question", "answer"),
    ("problem", "answer"),
    ("problem", "solution"),
    ("instruction", "output"),
    ("prompt", "completion"),
    ("prompt", "answer"),
    ("prompt", "response"),
)
# The more specific layout first: problems with a short answer often also contain a conversation.
LAYOUTS: tuple[Layout, ...] = (_FIELD, *_PAIRS, _CHAT)
COLUMNS = frozenset({"data_source", "ability", "extra_info", "tools", "input"}.union(*LAYOUTS))
"""All columns that are used to build a row."""


def check_columns(columns: Collection[str], where: str, further: Collection[str] = ()) -> None:
    """Raises InputError if the columns of a file match no layout or lack one of the `further` ones."""
    _layout_of(columns, where)
    if missing := [name for name in further if name not in columns]:
        seen = f"no column {', '.join(missing)}; columns found: {', '.join(sorted(columns))}"
        raise InputError("the columns listed in data.columns", seen, where, "correct data.columns, or add the column")


def to_row(record: Row, split: str, index: int, where: str, columns: Collection[str] = ()) -> Row:
    """The row of a record of any layout, with those additional `columns` that the record has.

    `extra_info.index` is `index`; an index in the record itself is kept as `own_index`. Raises InputError, naming the
    problem and `where`, if the record cannot be converted.
    """
    layout = _layout_of([name for name, value in record.items() if value is not None], where)
    prompt, truth, answer = _problem(layout, record, where)
    extra = _object(plain(record.get("extra_info")), "extra_info", where)
    if extra.get("index", index) != index:
        extra["own_index"] = extra["index"]
    extra |= _tools(record.get("tools"), extra, where)
    return {
        **{name: record[name] for name in columns if name in record},
        "data_source": _data_source(record, where),
        "prompt": prompt,
        "ability": record.get("ability") or "",
        "reward_model": _reward_model(record, truth, where),
        "extra_info": {"split": split, **({} if answer is None else {"answer": answer}), **extra, "index": index},
    }


def _layout_of(columns: Collection[str], where: str) -> Layout:
    for layout in LAYOUTS:
        if all(name in columns for name in layout):
            return layout
    raise InputError(
        expected="the columns of a layout: " + ", ".join(" and ".join(layout) for layout in LAYOUTS),
        seen=f"no such columns, or no values in them; columns found: {', '.join(sorted(columns)) or 'none'}",
        where=where,
        fix="rename the columns of the problem and its answer, or add the missing ones",
    )


def _problem(layout: Layout, record: Row, where: str) -> tuple[list[dict[str, Any]], str | None, str | None]:
    """Prompt, ground truth (None if in `reward_model`), and the answer of a perfect model (None if unknown)."""
    if layout == _FIELD:
        return _messages(plain(record["prompt"]), "prompt", where), None, None
    if layout == _CHAT:
        return _conversation(record, where)
    question, answer = layout
    truth = reference = _answer(record[answer], answer, layout, where)
    if question == "problem":
        solution = record.get("solution")
        reference = solution if isinstance(solution, str) and solution.strip() else truth
        truth = last_box(truth) or truth if answer == "solution" else truth
    return _question(record, question, layout, where), truth, reference


def _question(record: Row, name: str, layout: Layout, where: str) -> list[dict[str, Any]]:
    question = plain(record[name]) if name == "prompt" else record[name]
    if isinstance(question, list) and question and all(isinstance(message, dict) for message in question):
        return _messages(question, name, where)
    question = record[name]
    if not isinstance(question, str) or not question.strip():
        raise InputError(f"a string in {name}{_of(layout)}", repr(question)[:80], where, f"correct {name}")
    more = record.get("input") if name == "instruction" else None
    if isinstance(more, str) and more.strip():
        question = f"{question}\n\n{more}"
    return [{"role": "user", "content": question}]


def _conversation(record: Row, where: str) -> tuple[list[dict[str, Any]], str | None, str | None]:
    messages = _messages(plain(record["messages"]), "messages", where)
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if record.get("reward_model") is not None and answers[-1:] != [len(messages) - 1]:
        return messages, None, None
    if not answers:
        fix = "add the answer as the last assistant message, or as reward_model"
        raise InputError(f"an assistant message{_of(_CHAT)}", "none, and no reward_model", where, fix)
    reference = _answer(messages[answers[-1]]["content"], "the last assistant message", _CHAT, where)
    return _messages(messages[: answers[-1]], "messages before the answer", where), reference, reference


def _messages(messages: Any, name: str, where: str) -> list[dict[str, Any]]:
    fix = f'write {name.split()[0]} as [{{"role": "user", "content": "…"}}]'
    if not isinstance(messages, list) or not messages:
        seen = "an empty list" if messages == [] else repr(messages)[:80]
        raise InputError(f"a non-empty list of messages in {name}", seen, where, fix)
    return [_message(message, where, fix) for message in messages]


def _message(message: Any, where: str, fix: str) -> dict[str, Any]:
    known = message if isinstance(message, dict) else {}
    # A turn that only calls tools has no content.
    content = known.get("content") or ("" if known.get("tool_calls") else None)
    role = known.get("role")
    if not isinstance(role, str) or not role or not isinstance(content, str):
        raise InputError("messages of {role, content}, both strings", repr(message)[:80], where, fix)
    return {**known, "content": content}


def _answer(value: Any, name: str, layout: Layout, where: str) -> str:
    if not _is_answer(value):
        raise InputError(f"a string or number in {name}{_of(layout)}", repr(value)[:80], where, f"correct {name}")
    return str(value)


def _is_answer(value: Any) -> bool:
    # Data-frame tools write missing values as NaN.
    return isinstance(value, str | int | float) and value == value and bool(str(value).strip())


def _reward_model(record: Row, truth: str | None, where: str) -> dict[str, Any]:
    if truth is not None and record.get("reward_model") is None:
        return {"style": "rule", "ground_truth": truth}
    reward_model = plain(record["reward_model"])
    if not isinstance(reward_model, dict) or not _is_answer(reward_model.get("ground_truth")):
        raise InputError(
            "reward_model.ground_truth, a string or number",
            repr(reward_model)[:80],
            where,
            'write reward_model as {"style": "rule", "ground_truth": "…"}; structured answers belong in extra_info',
        )
    style, truth = reward_model.get("style") or "rule", str(reward_model["ground_truth"])
    return {**reward_model, "style": style, "ground_truth": truth}


def _data_source(record: Row, where: str) -> str:
    source = NO_SOURCE if record.get("data_source") is None else record["data_source"]
    if not isinstance(source, str) or not source:
        raise InputError("a string in data_source", repr(source), where, "set it to the scorer or source of the row")
    return source


def _object(value: Any, name: str, where: str) -> dict[str, Any]:
    """The named value as a new dict; empty if the value is missing."""
    if value is None or value == "":
        return {}
    if not isinstance(value, dict):
        fix = f"make {name} a struct or a JSON object as a string, or remove it"
        raise InputError(f"a struct in {name}", repr(value)[:80], where, fix)
    return dict(value)


def _tools(column: Any, extra: dict[str, Any], where: str) -> dict[str, Any]:
    """`tools_kwargs` and `tools` of the row's `extra_info` if the row selects its tools, by `tools_kwargs` or by a
    column `tools` of schemas {type: function, function: {name, description, parameters}}."""
    kwargs = {
        name: given
        for name, given in _object(parsed(extra.get("tools_kwargs")), "tools_kwargs", where).items()
        if given is not None
    }
    if wrong := next((name for name, given in kwargs.items() if not isinstance(given, dict)), None):
        fix = 'write it as {"create_kwargs": {…}}, or {} if the tool needs none'
        raise InputError(f"a struct in extra_info.tools_kwargs.{wrong}", repr(kwargs[wrong])[:80], where, fix)
    schemas = plain(column)
    if schemas is None or schemas == "":
        return {"tools_kwargs": kwargs} if extra.get("tools_kwargs") is not None else {}
    if not isinstance(schemas, list):
        raise InputError("a list of schemas in tools", repr(schemas)[:80], where, "make tools a list")
    tools = {schema["function"]["name"]: schema for schema in (_schema(schema, where) for schema in schemas)}
    if unknown := [name for name in kwargs if name not in tools]:
        seen, fix = f"'{unknown[0]}'", "add the tool's schema to tools, or remove the tool from extra_info.tools_kwargs"
        raise InputError(f"names among the row's tools {', '.join(tools)}", seen, where, fix)
    return {"tools_kwargs": {name: kwargs.get(name, {}) for name in tools}, "tools": list(tools.values())}


def _schema(schema: Any, where: str) -> dict[str, Any]:
    schema = parsed(schema)
    function = parsed(schema.get("function")) if isinstance(schema, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        form = "{type: function, function: {name, description, parameters}}"
        raise InputError(f"schemas {form} in tools", repr(schema)[:80], where, "write tools in OpenAI's format")
    parameters = {"parameters": parsed(function["parameters"])} if "parameters" in function else {}
    return {**schema, "function": {**function, **parameters}}


def _of(layout: Layout) -> str:
    return f", as in the layout {' and '.join(layout)}"
