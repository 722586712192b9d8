import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import InputError
from rl_core.rollout.tools import BadArguments, ToolError, resolve_tools, tool
from rl_core.rollout.tools.base import FunctionTool
from rl_core.rollout.tools.calculator import MAX_LENGTH, calculator, evaluate, format_number


def search(
    query: str,
    limit: int = 5,
    score: float = 0.5,
    exact: bool = False,
    tags: list[str] = [],  # noqa: B006
    filters: Optional[dict[str, int]] = None,  # noqa: UP045
    order: Literal["new", "old"] = "new",
    copy: str | None = None,
) -> str:
    """Searches the pages
    of a wiki.

    It is quick.

    Args:
        query: What to look for,
            in words.
        limit: Number of pages.
    """
    return f"{query} {limit} {score} {exact} {tags} {filters} {order} {copy}"


def test_a_function_gets_its_schema_from_hints_defaults_and_docstring() -> None:
    schema = FunctionTool(search).schema()
    function = schema["function"]
    assert schema["type"] == "function"
    assert function["name"] == "search" and function["description"] == "Searches the pages of a wiki."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for, in words."},
            "limit": {"type": "integer", "default": 5, "description": "Number of pages."},
            "score": {"type": "number", "default": 0.5},
            "exact": {"type": "boolean", "default": False},
            "tags": {"type": "array", "items": {"type": "string"}, "default": []},
            "filters": {
                "anyOf": [{"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "null"}],
                "default": None,
            },
            "order": {"type": "string", "enum": ["new", "old"], "default": "new"},
            "copy": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["query"],
    }


def test_a_function_without_parameters_or_docstring_has_a_schema() -> None:
    def now() -> str:
        return ""

    assert FunctionTool(now).schema()["function"] == {
        "name": "now",
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    }


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "argument 'query': Field required"),
        ({"query": 3}, "argument 'query': Input should be a valid string"),
        ({"query": "a", "limit": "5"}, "argument 'limit': Input should be a valid integer"),
        ({"query": "a", "exact": 1}, "argument 'exact'"),
        ({"query": "a", "tags": ["x", 1]}, "argument 'tags.1'"),
        ({"query": "a", "filters": {"x": "y"}}, "argument 'filters.x'"),
        ({"query": "a", "order": "oldest"}, "argument 'order': Input should be 'new' or 'old'"),
        ({"query": "a", "page": 1}, "argument 'page': Extra inputs are not permitted"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadArguments) as error:
        FunctionTool(search).parse(arguments)
    assert problem in str(error.value)


def test_arguments_that_fit_reach_the_function_and_others_keep_their_default() -> None:
    made = FunctionTool(search)
    parsed = made.parse({"query": "a", "score": 1, "filters": {"x": 1}, "copy": "y"})
    assert made.execute(parsed) == "a 5 1.0 False [] {'x': 1} new y"


def test_a_marked_function_stays_a_function_and_is_checked_at_once() -> None:
    assert tool(search)("a").startswith("a 5")

    def unhinted(a: int, b) -> int:  # type: ignore[no-untyped-def]
        return a

    def starred(*a: int) -> int:
        return 0

    for function, seen in ((unhinted, "'b' has no type hint"), (starred, "'*a: int'")):
        with pytest.raises(InputError) as error:
            tool(function)
        assert seen in error.value.seen
    with pytest.raises(InputError):
        tool(lambda x: x)


def test_tools_are_found_by_name_and_called_by_the_name_in_their_schema() -> None:
    names = ("calculator", "tools_for_tests:fixed", "tools_for_tests:Diary", "tools_for_tests:Written")
    factories = resolve_tools(names)
    assert list(factories) == ["calculator", "fixed", "diary", "written"]
    made = factories["diary"]()
    assert made is not factories["diary"]()
    assert made.schema()["function"]["parameters"]["required"] == ["entry"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("calculatr",), "did you mean calculator"),
        (("tools_for_tests:absent",), "absent"),
        (("no_module_here:x",), "ModuleNotFoundError"),
        (("tools_for_tests:no_hint",), "'b' has no type hint"),
        (("tools_for_tests:NoSchema",), "defines neither `arguments` nor `schema`"),
        (("tools_for_tests:NoExecute",), "no method `execute`"),
        (("tools_for_tests:Countdown",), "is a Countdown"),
        (("calculator", "calculator"), "two tools named 'calculator'"),
    ],
)
def test_names_without_a_usable_tool_are_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as error:
        resolve_tools(names)
    assert message in str(error.value)


NUMBERS = st.one_of(st.integers(0, 10**6).map(str), st.decimals(0, 10**4, places=3).map(str))


def joined(parts: st.SearchStrategy[tuple[str, Any]]) -> st.SearchStrategy[tuple[str, Any]]:
    """Texts of operations and parentheses, with functions that give their values."""

    def binary(found: tuple[tuple[str, Any], str, tuple[str, Any]]) -> tuple[str, Any]:
        (left, a), operator, (right, b) = found
        apply: dict[str, Callable[[], Fraction]] = {
            "+": lambda: a() + b(),
            "-": lambda: a() - b(),
            "*": lambda: a() * b(),
            "/": lambda: a() / b(),
        }
        return f"({left}) {operator}({right})", apply[operator]

    pairs = st.tuples(parts, st.sampled_from("+-*/"), parts).map(binary)
    return st.one_of(pairs, parts.map(lambda part: (f"-({part[0]})", lambda: -part[1]())))


EXPRESSIONS = st.recursive(NUMBERS.map(lambda text: (text, lambda: Fraction(text))), joined, max_leaves=12)


@given(EXPRESSIONS)
@settings(max_examples=200, deadline=None)
def test_the_calculator_is_exact(expression: tuple[str, Callable[[], Fraction]]) -> None:
    text, value = expression
    try:
        wanted = value()
    except ZeroDivisionError:
        with pytest.raises(ToolError, match="division by zero"):
            evaluate(text)
        return
    assert evaluate(text) == wanted
    assert abs(Fraction(format_number(wanted)) - wanted) <= abs(wanted) / 10**19


@given(st.lists(NUMBERS, min_size=2, max_size=8), st.data())
@settings(max_examples=100, deadline=None)
def test_the_calculator_binds_as_python_does(numbers: list[str], data: st.DataObject) -> None:
    operators = [data.draw(st.sampled_from("+-*")) for _ in numbers[1:]]
    text = numbers[0] + "".join(operator + number for operator, number in zip(operators, numbers[1:], strict=True))
    exact = "".join(
        f"{operator}Fraction('{number}')" for operator, number in zip(["", *operators], numbers, strict=True)
    )
    assert evaluate(text) == eval(exact, {"Fraction": Fraction})


@given(st.one_of(st.text(), st.text("0123456789.+-*/() \n\u00a0", max_size=MAX_LENGTH + 10)))
@settings(max_examples=500, deadline=None)
def test_any_text_has_a_value_or_a_message(text: str) -> None:
    begin = time.process_time()
    try:
        assert Fraction(calculator(text)) is not None
    except ToolError as error:
        assert str(error)  # noqa: PT017
    assert time.process_time() - begin < 0.5


@pytest.mark.parametrize(
    ("expression", "answer"),
    [("2*(3+4)", "14"), ("0.1 + 0.2", "0.3"), ("-1/8", "-0.125"), ("1/3", "0.33333333333333333333"), ("100", "100")],
)
def test_results_are_integers_or_decimals(expression: str, answer: str) -> None:
    assert calculator(expression) == answer


@pytest.mark.parametrize(
    "text", ["", "2**9", "1/0", "abs(1)", "(" * 400, "-" * 400, "1" * 1001, "1 2", "(1", "1)", "1e9"]
)
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ToolError):
        calculator(text)


@pytest.mark.parametrize(
    "text", ["9*" * 499 + "9", "1/" + "7/" * 498 + "7", "+".join(f"1/{n}" for n in range(101, 260))[:999]]
)
def test_the_largest_expressions_are_quick(text: str) -> None:
    begin = time.process_time()
    assert len(calculator(text.rstrip("+/"))) < 3 * MAX_LENGTH
    assert time.process_time() - begin < 0.1
