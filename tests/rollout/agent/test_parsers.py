import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.rollout.agent.parsers import MAX_CALLS, MAX_DEPTH, PARSERS, ToolCall

SCHEMAS = {
    "add": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "x": {"type": "number"},
            "yes": {"type": "boolean"},
            "text": {"type": "string"},
            "list": {"type": "array"},
            "object": {"type": "object"},
            "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "either": {"type": ["string", "null"]},
            "any": True,
            "other": {"anyOf": [{"$ref": "#/$defs/Other"}, {"type": "null"}]},
        },
    }
}
# What the schema's parameters may hold.
KINDS: dict[str, tuple[type, ...]] = {
    "a": (int,), "x": (int, float), "yes": (bool,), "text": (str,), "list": (list,), "object": (dict,),
}  # fmt: skip


def hermes(name: str, arguments: dict[str, Any]) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"


def qwen3_coder(name: str, arguments: dict[str, Any]) -> str:
    def written(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value) if isinstance(value, dict | list) else str(value)

    parameters = "".join(f"<parameter={key}>\n{written(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def llama3(*calls: tuple[str, dict[str, Any]]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def mistral_list(*calls: tuple[str, dict[str, Any]]) -> str:
    return "[TOOL_CALLS] " + json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def pythonic(*calls: tuple[str, dict[str, Any]]) -> str:
    def written(arguments: dict[str, Any]) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in arguments.items())

    return "[" + ", ".join(f"{name}({written(arguments)})" for name, arguments in calls) + "]"


def each(one: Callable[[str, dict[str, Any]], str]) -> Callable[..., str]:
    return lambda *calls: "\n".join(one(*call) for call in calls)


Writer = Callable[..., str]
WRITERS: list[tuple[str, Writer]] = [
    ("hermes", each(hermes)),
    ("qwen3_coder", each(qwen3_coder)),
    ("llama3", llama3),
    ("llama3", lambda *calls: "<|python_tag|>" + llama3(*calls)),
    ("mistral", mistral_list),
    ("mistral", each(lambda name, arguments: f"[TOOL_CALLS]{name}{json.dumps(arguments)}")),
    ("mistral", each(lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}")),
    ("pythonic", pythonic),
]
TAKES_TEXT_BEFORE = [writer for writer in WRITERS if "llama3" not in writer and "pythonic" not in writer] + [WRITERS[3]]
NESTED = {"object": {"deep": [1, {"é": '日本 "quoted" \n </x> {'}, None, True]}, "text": " a\nb ", "x": -2.5}
# Marks of all formats, which strings may hold as well; a bare parameter must not hold those of parameters.
MARKS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", '{"name": "add"', "[add(a=1)]"]
TEXTS = st.text() | st.lists(st.sampled_from(MARKS) | st.text(max_size=3), max_size=5).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries({}, optional={
    "a": st.integers(), "x": st.floats(allow_nan=False, allow_infinity=False), "yes": st.booleans(), "text": TEXTS,
    "list": st.lists(VALUES, max_size=3), "object": st.dictionaries(st.text(max_size=5), VALUES, max_size=3),
})  # fmt: skip
CALLS = st.lists(st.tuples(st.sampled_from(["add", "shop.search", "_x1"]), ARGUMENTS), min_size=1, max_size=4)
FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>", "</parameter>", "<|python_tag|>",
    "[TOOL_CALLS]", "[ARGS]", '{"name": "add", "arguments": {"a": 1}}', '{"name": "add", "parameters": {}}', "add(a=1)",
    "{", "}", "[", "]", "(", ")", '"', "'", ",", ";", ":", "=", "\\", "\n", "\0", "\ud800", "-", "9" * 5000, "f'{1}'",
]  # fmt: skip
ANY_TEXT = st.text(st.characters(exclude_categories=[]))


def parse(form: str, text: str) -> tuple[str, list[ToolCall]]:
    return PARSERS[form](text, SCHEMAS)


@pytest.mark.parametrize(("form", "write"), WRITERS)
def test_one_call_and_several_are_read_in_every_form(form: str, write: Writer) -> None:
    several = [("add", {"a": 1}), ("other", {"text": "é"}), ("add", {"a": -3})]
    every: list[list[tuple[str, Any]]] = [[("add", {})], [("add", NESTED)], several]
    for calls in every:
        assert parse(form, write(*calls)) == ("", [ToolCall(*call) for call in calls])


@pytest.mark.parametrize("mark", [*MARKS, "".join(MARKS)])
@pytest.mark.parametrize(("form", "write"), WRITERS)
def test_strings_of_a_call_may_hold_the_marks_of_calls(form: str, write: Writer, mark: str) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("add", {"text": f"a {mark} b", "list": [mark]}), ("add", {"a": 1})]
    assert parse(form, write(*calls)) == ("", [ToolCall(*call) for call in calls])


@pytest.mark.parametrize("length", [4000, 4096, 40_000])
def test_long_strings_are_read_whole(length: int) -> None:
    for tail in ("", "é", "\\", '"', "<tool_call>"):
        text, calls = parse("hermes", hermes("add", {"text": "x" * length + tail, "a": 12345678901234567890}) + "!")
        assert calls == [ToolCall("add", {"text": "x" * length + tail, "a": 12345678901234567890})] and text == "!"


@pytest.mark.parametrize(("form", "write"), TAKES_TEXT_BEFORE)
def test_text_around_calls_is_kept_apart(form: str, write: Writer) -> None:
    text, calls = parse(form, "I add: {1}\n" + write(("add", {"a": 1})) + " and so on")
    assert calls == [ToolCall("add", {"a": 1})]
    assert text.startswith("I add: {1}\n") and text.endswith("and so on") and 'add"' not in text


@pytest.mark.parametrize(
    "text",
    [
        "", "  \n", "It is 4.", "[1, 2]", "[]", '["a"]', "[link](http://x)", "[see add(1) and", "{1, 2}", "{", "[",
        '{"age": 3}', '{"name": "Ann"}', '{"name": "Ann", "age": 3}', '{"parameters": {}}', '{"age": 3',
        "[x for x in y]", "call add(a=1)", "tool_call", "</tool_call>", "TOOL_CALLS", "[add", "add(a=1)", '"\\"', "\0",
        "[\ud800]",
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", PARSERS)
def test_a_turn_without_calls_is_its_text(form: str, text: str) -> None:
    assert parse(form, text) == (text, [])


@pytest.mark.parametrize(
    ("form", "text", "says"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "invalid JSON, Expecting ','"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}', "</tool_call> is missing"),
        ("hermes", "<tool_call>", "invalid JSON"),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', '"arguments" is not'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', '"arguments" is not'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "no valid name"),
        ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>', "no valid name"),
        ("hermes", '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>', "no valid name"),
        ("hermes", "<tool_call>[1]</tool_call>", "not a JSON object"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}} 2</tool_call>', "</tool_call> is missing"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "limit"),
        ("qwen3_coder", "<tool_call>add</tool_call>", "<function= is missing"),
        ("qwen3_coder", "<tool_call><function=add</tool_call>", "no valid name|missing"),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</function></tool_call>", "</parameter> is missing"),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter></tool_call>", "<parameter= is missing"),
        ("qwen3_coder", "<tool_call><function=add></function>", "</tool_call> is missing"),
        ("qwen3_coder", qwen3_coder("add", {"a": "x"}), "parameter a is not of type integer"),
        ("qwen3_coder", qwen3_coder("add", {"a": "1.5"}), "parameter a is not of type integer"),
        ("qwen3_coder", qwen3_coder("add", {"yes": "1"}), "parameter yes is not of type boolean"),
        ("qwen3_coder", qwen3_coder("add", {"object": "[]"}), "parameter object is not of type object"),
        ("llama3", '{"name": "add", "parameters": {"a": 1}', "invalid JSON"),
        ("llama3", '{"name": "add", "parameters": 1}', '"parameters" is not'),
        ("llama3", "<|python_tag|>print(1)", "invalid JSON"),
        ("llama3", '<|python_tag|>{"a": 1}', '"parameters" is not'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}}', "invalid JSON"),
        ("mistral", '[TOOL_CALLS][{"name": "add"}]', '"arguments" is not'),
        ("mistral", "[TOOL_CALLS]add", "invalid JSON"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{", "invalid JSON"),
        ("mistral", "[TOOL_CALLS]{}", "no valid name"),
        ("pythonic", '[add(a="x"', "never closed"),
        ("pythonic", "[add(1)]", "arguments need their names"),
        ("pythonic", "[add(**{})]", "arguments need their names"),
        ("pythonic", "[add(a=1)(b=2)]", "no valid name"),
        ("pythonic", "[add(a=1)" + " " * 100_000 + "]", "longer than"),
        ("pythonic", "[add(a=" + "-" * 3000 + "1)]", "too deeply"),
        ("pythonic", "[add(a='\0')]", "null bytes"),
        ("pythonic", f"[add(a=[0x{'F' * 4000}])]", "a number among its arguments is too long"),
        *(
            ("pythonic", f"[add(a={value})]", "arguments are numbers")
            for value in (
                "g()", "x", "1 + 1", "f'{1}'", "b''", "1j", "...", "{1}", "{1: 2}", "{**x}", "not 1", "[y for y in z]",
            )
        ),
    ],
)  # fmt: skip
def test_a_broken_call_says_what_is_wrong(form: str, text: str, says: str) -> None:
    _, (call,) = parse(form, text)
    assert (call.name, call.arguments) == ("", {})
    assert call.error.startswith("the tool call cannot be read: ")
    assert any(part in call.error for part in says.split("|")), call.error


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call>{</tool_call>" + hermes("add", {"a": 1})),
        ("qwen3_coder", "<tool_call><function=x></tool_call>" + qwen3_coder("add", {"a": 1})),
        ("mistral", "[TOOL_CALLS]x{[TOOL_CALLS]add{\"a\": 1}"),
        ("mistral", '[TOOL_CALLS][1, {"name": "add", "arguments": {"a": 1}}]'),
        ("pythonic", "[add(2), add(a=1)]"),
        ("pythonic", "[2, add(a=1)]"),
    ],
)  # fmt: skip
def test_a_broken_call_does_not_hide_the_next(form: str, text: str) -> None:
    _, (broken, call) = parse(form, text)
    assert broken.error and call == ToolCall("add", {"a": 1})


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
def test_a_call_quoted_in_a_broken_one_is_not_run(form: str) -> None:
    quoted = {"hermes": hermes, "qwen3_coder": qwen3_coder}[form]("add", {"a": 1})
    text, (broken,) = parse(form, f"a <tool_call>broken {quoted} b")
    assert text == "a  b" and broken.error


def test_text_after_a_broken_call_is_kept() -> None:
    assert parse("hermes", "a <tool_call>{</tool_call> b")[0] == "a  b"


def test_after_a_call_and_a_semicolon_there_is_a_call_or_nothing() -> None:
    call = llama3(("add", {"a": 1}))
    assert parse("llama3", call + " ; ") == ("", [ToolCall("add", {"a": 1})])
    for more in '{"x": 1}', "thanks":
        text, (first, broken) = parse("llama3", f"{call}; {more}")
        assert text == "" and first == ToolCall("add", {"a": 1}) and broken.error


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("a", "3", 3), ("a", " -3 ", -3), ("x", "3", 3), ("x", "2.5e3", 2500.0), ("yes", "true", True),
        ("yes", "False", False), ("text", "3", "3"), ("text", "null", "null"), ("text", "\n3\n", "\n3\n"),
        ("text", "", ""), ("list", "[1, 2]", [1, 2]), ("object", '{"a": [null]}', {"a": [None]}), ("maybe", "3", 3),
        ("maybe", "None", None), ("either", "null", None), ("either", "3", "3"), ("unknown", "3", "3"),
        ("any", "2", 2), ("any", "red", "red"), ("other", "red", "red"), ("other", "None", None), ("other", "2", "2"),
        ("unknown", '{"a": 1}', {"a": 1}), ("unknown", "[1", "[1"), ("unknown", "[1] [2]", "[1] [2]"),
    ],
)  # fmt: skip
def test_bare_text_of_a_parameter_gets_the_type_of_the_schema(key: str, text: str, value: object) -> None:
    _, (call,) = parse("qwen3_coder", qwen3_coder("add", {key: text}))
    assert call.arguments == {key: value} and type(call.arguments[key]) is type(value), call.error


def test_mistral_calls_may_have_an_id() -> None:
    assert parse("mistral", '[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1}') == ("", [ToolCall("add", {"a": 1})])


def test_pythonic_arguments_may_be_json_words_and_tuples() -> None:
    _, (call,) = parse("pythonic", r"[shop.all.find(a=true, b=None, c=null, d=(1, -2.5), e='\d')]")
    assert call == ToolCall("shop.all.find", {"a": True, "b": None, "c": None, "d": [1, -2.5], "e": r"\d"})


@given(st.sampled_from(WRITERS), CALLS)
@settings(max_examples=400, deadline=None)
def test_what_is_written_in_a_form_is_read_back(writer: tuple[str, Writer], calls: list[tuple[str, Any]]) -> None:
    form, write = writer
    if form == "qwen3_coder":  # only the schema knows types
        calls = [("add", arguments) for _, arguments in calls]
    text, found = parse(form, write(*calls))
    assert text == "" and found == [ToolCall(*call) for call in calls]
    for call in found:
        assert all(type(value) in KINDS[key] for key, value in call.arguments.items())


@given(st.sampled_from(sorted(PARSERS)), ANY_TEXT | st.lists(st.sampled_from(FRAGMENTS) | ANY_TEXT).map("".join))
@settings(max_examples=500, deadline=None)
def test_no_text_breaks_a_parser(form: str, text: str) -> None:
    outside, calls = parse(form, text)
    assert calls or outside == text
    assert all(call.error != "" or call.name for call in calls)


@given(st.sampled_from(WRITERS), CALLS, st.data())
@settings(max_examples=500, deadline=None)
def test_no_mutation_of_calls_breaks_a_parser(writer: tuple[str, Writer], calls: Any, data: st.DataObject) -> None:
    form, write = writer
    text = write(*calls)
    for _ in range(data.draw(st.integers(1, 3))):
        start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        text = text[:start] + data.draw(st.sampled_from(["", text[start:end] * 2, *FRAGMENTS])) + text[end:]
    for call in parse(form, text)[1]:
        assert call.error or call.name


HEADS = ["", "<tool_call>", "<tool_call><function=add><parameter=a>", "<|python_tag|>", "[TOOL_CALLS]", "[add(a="]
PIECES = [
    *FRAGMENTS, '<tool_call>["', '<tool_call>["</tool_call>",', "<tool_call><function=a><parameter=b>", "[TOOL_CALLS]{",
    '<tool_call>"' + "\n" * 9000, "[TOOL_CALLS][" + "\n" * 9000,
    "<tool_call>{", "<tool_call>[[", '<tool_call>"</tool_call>', "<parameter=a>1</parameter>", "[1,", "{},",
    '{"a":', "[TOOL_CALLS]a{}", '{"name":"a","parameters":{}};', " ", '"\\', "[add(a=1),", "x",
]  # fmt: skip


@pytest.mark.parametrize("form", PARSERS)
@pytest.mark.parametrize("piece", PIECES)
def test_four_megabytes_take_a_second_at_most(form: str, piece: str) -> None:
    for head in HEADS:
        text = head + piece * (4_000_000 // len(piece))
        start = time.process_time()
        _, calls = parse(form, text)
        assert time.process_time() - start < 1.0, head
        assert len(calls) <= MAX_CALLS + 1


@pytest.mark.parametrize(("form", "write"), WRITERS)
def test_deeply_nested_arguments_are_a_broken_call(form: str, write: Writer) -> None:
    def nested(levels: int) -> list[tuple[str, Any]]:
        return [("add", {"list": json.loads("[" * levels + "]" * levels)})]

    assert parse(form, write(*nested(MAX_DEPTH - 1))) == ("", [ToolCall(*call) for call in nested(MAX_DEPTH - 1)])
    for levels in MAX_DEPTH, 900:
        _, (call,) = parse(form, write(*nested(levels)))
        assert "deeply" in call.error or "too many nested" in call.error


@pytest.mark.parametrize("form", PARSERS)
@pytest.mark.parametrize("levels", [990, 5000, 1_000_000])
def test_nesting_that_no_parser_takes_is_a_broken_call_or_text(form: str, levels: int) -> None:
    heads = [
        '<tool_call>{"name": ',
        '{"name": ',
        '[TOOL_CALLS]add{"a":',
        "[add(a=",
        "<tool_call><function=f><parameter=a>",
    ]
    for head in heads:
        for opening in "[", '{"a":', "(", "-":
            assert all(call.error for call in parse(form, head + opening * levels)[1])


@pytest.mark.parametrize(("form", "write"), WRITERS)
def test_calls_beyond_the_limit_are_one_broken_call(form: str, write: Writer) -> None:
    _, calls = parse(form, write(*[("add", {})] * (MAX_CALLS + 5)))
    assert [bool(call.error) for call in calls] == [False] * MAX_CALLS + [True]


@pytest.mark.parametrize(("form", "write"), WRITERS)
def test_nothing_in_the_text_is_run(form: str, write: Writer, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    code = f"__import__('pathlib').Path({str(trap)!r}).touch()"
    for text in (
        code, f"[{code}]", f"[add(a={code})]", f"[{code}, add(a=1)]", f"[add(a=f'{{{code}}}')]",
        f"[(lambda: {code})()]", f"[add(a=[{code} for x in (1,)])]", f"<|python_tag|>{code}", f"[TOOL_CALLS]{code}{{}}",
        f"<tool_call>{code}</tool_call>", qwen3_coder("add", {"object": code}), write(("add", {"text": code})),
    ):  # fmt: skip
        parse(form, text)
    assert not trap.exists()
