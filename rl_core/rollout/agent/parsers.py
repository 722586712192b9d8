"""Parsers for tool calls in the text of a model's turn, one per call format.

The text is untrusted: nothing in it is evaluated, parsing time is linear in its length, and an unreadable call becomes
a call with an error message for the model, never an exception.
"""

import ast
import functools
import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

MAX_CALLS = 1000
"""Maximum number of calls in one turn; the rest becomes one broken call."""
MAX_DEPTH = 64
"""Maximum nesting depth of a call's arguments, so that later code can recurse safely."""
MAX_PYTHON = 100_000
"""Maximum length in characters of a turn passed to Python's parser."""

Schemas = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class ToolCall:
    """A tool call requested by the model; a call with an `error` is not run, and the model gets the error."""

    name: str
    arguments: dict[str, Any]
    error: str = ""


Parser = Callable[[str, Schemas], tuple[str, list[ToolCall]]]
Reader = Callable[[str, Schemas], Iterator[str | ToolCall]]
"""Yields the pieces of a turn in order: text outside of calls, and calls."""

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[\w.:/-]{1,128}")
_JSON = json.JSONDecoder()
_LONGEST_TOKEN = 16
"""Characters of JSON outside of strings and numbers that a decoder reads at once, such as `-Infinity`."""
_PARAMETER_TAG = re.compile("</parameter>|<parameter=|</function>")
_JSON_CALL_BEGINS = re.compile(r'\s*\{\s*"name"\s*:')
_PYTHON_CALL_BEGINS = re.compile(r"\[\s*[^\W\d][\w.]*\s*\(\s*(?:\)|[^\W\d]\w*\s*=)")
# Both JSON and Python spellings occur; keys are lower case.
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None, "none": None}
_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def _hermes(text: str, schemas: Schemas) -> Iterator[str | ToolCall]:
    def read(start: int) -> tuple[ToolCall, int]:
        value, end = _read_json(text, start)
        return _object_call(value, "arguments"), end

    return _tagged(text, read)


def _qwen3_coder(text: str, schemas: Schemas) -> Iterator[str | ToolCall]:
    def read(start: int) -> tuple[ToolCall, int]:
        name, at = _until(text, _expect(text, start, "<function="), ">")
        properties = schemas.get(name, {}).get("properties", {})
        arguments = {}
        while not text.startswith("</function>", at := _skip(text, at)):
            key, at = _until(text, _expect(text, at, "<parameter="), ">")
            value, at = _parameter(text, at)
            arguments[key] = _convert(key, value.removeprefix("\n").removesuffix("\n"), properties.get(key, {}))
        return _call(name, arguments), _expect(text, at, "</function>")

    return _tagged(text, read)


def _llama3(text: str, schemas: Schemas) -> Iterator[str | ToolCall]:
    before, tag, rest = text.partition("<|python_tag|>")
    # Without the tag, JSON is a call only if the turn starts with it and it has the keys of a call. Its strings may
    # contain the tag.
    is_call = bool(tag) and not _starts_with_call(text)
    if is_call:
        yield before
    else:
        rest = text
    at = 0
    while True:
        try:
            value, at = _read_json(rest, at)
        except ValueError as problem:
            yield _broken(problem) if is_call or _JSON_CALL_BEGINS.match(rest) else rest
            return
        if not is_call and not _is_llama3_call(value):
            yield rest
            return
        yield _object_call(value, "parameters")
        is_call = True
        at = _skip(rest, at)
        separated = rest.startswith(";", at)
        at = _skip(rest, at + separated)
        if not separated or at == len(rest):
            yield rest[at:]
            return


def _starts_with_call(text: str) -> bool:
    try:
        return _is_llama3_call(_read_json(text)[0])
    except ValueError:
        return False


def _is_llama3_call(value: Any) -> bool:
    return isinstance(value, dict) and {"name", "parameters"} <= value.keys()


def _mistral(text: str, schemas: Schemas) -> Iterator[str | ToolCall]:
    tag, at = "[TOOL_CALLS]", 0
    while (begin := text.find(tag, at)) >= 0:
        yield text[at:begin]
        start = _skip(text, begin + len(tag))
        following = text.find(tag, start) % (len(text) + 1)  # the end of the text if there is no further tag
        try:
            if text.startswith("[", start):
                calls, at = _read_json(text, start)
                yield from (_object_call(value, "arguments") for value in calls)
            else:
                brace = max(text.find("{", start, following), start)
                arguments, at = _read_json(text, brace)
                name = text[start:brace].strip().removesuffix("[ARGS]").partition("[CALL_ID]")[0]
                yield _call(name, arguments)
        except ValueError as problem:
            yield _broken(problem)
            at = following
    yield text[at:]


def _pythonic(text: str, schemas: Schemas) -> Iterator[str | ToolCall]:
    turn = text.strip()
    try:
        body = _parse_python(turn) if turn.startswith("[") else None
    except ValueError as problem:
        yield _broken(problem) if _PYTHON_CALL_BEGINS.match(turn) else text
        return
    if not isinstance(body, ast.List) or not any(isinstance(element, ast.Call) for element in body.elts):
        yield text
        return
    for element in body.elts:
        try:
            yield _python_call(element)
        except ValueError as problem:
            yield _broken(problem)


def _parse(read: Reader, text: str, schemas: Schemas) -> tuple[str, list[ToolCall]]:
    outside: list[str] = []
    calls: list[ToolCall] = []
    for piece in read(text, schemas):
        if isinstance(piece, str):
            outside.append(piece)
        elif len(calls) < MAX_CALLS:
            calls.append(piece)
        else:
            calls.append(_broken(f"more than {MAX_CALLS} calls in one turn"))
            break
    return ("".join(outside).strip(), calls) if calls else (text, [])


PARSERS: dict[str, Parser] = {
    "hermes": functools.partial(_parse, _hermes),
    "qwen3_coder": functools.partial(_parse, _qwen3_coder),
    "llama3": functools.partial(_parse, _llama3),
    "mistral": functools.partial(_parse, _mistral),
    "pythonic": functools.partial(_parse, _pythonic),
}
"""Map (text of a turn with special tokens but without the stop token, parameter schemas by tool name) to (text outside
of calls, calls). The schemas provide the types of parameters written as bare text."""


def _tagged(text: str, read: Callable[[int], tuple[ToolCall, int]]) -> Iterator[str | ToolCall]:
    """Pieces of a turn with calls in `<tool_call>…</tool_call>`; `read` returns the call that starts at an index, and
    the index of its end. Tags inside of a call's strings are part of the string."""
    at = 0
    while (begin := text.find("<tool_call>", at)) >= 0:
        yield text[at:begin]
        start = begin + len("<tool_call>")
        try:
            call, end = read(start)
            at = _expect(text, end, "</tool_call>")
        except ValueError as problem:
            call = _broken(problem)
            # Not at the next opening tag, which may be quoted in the broken call.
            closing = text.find("</tool_call>", start)
            at = closing + len("</tool_call>") if closing >= 0 else len(text)
        yield call
    yield text[at:]


def _object_call(value: Any, key: str) -> ToolCall:
    if not isinstance(value, dict):
        return _broken("it is not a JSON object")
    if not isinstance(value.get(key), dict):
        return _broken(f'its "{key}" is not a JSON object')
    return _call(value.get("name"), value[key])


def _call(name: Any, arguments: dict[str, Any]) -> ToolCall:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return _broken("it has no valid name")
    if _deeper(arguments, MAX_DEPTH):
        return _broken("its arguments are nested too deeply")
    try:
        json.dumps(arguments)  # must be serialisable; Python rejects integers of more than 4,300 digits
    except ValueError:
        return _broken("a number among its arguments is too long")
    return ToolCall(name, arguments)


def _broken(problem: object) -> ToolCall:
    return ToolCall("", {}, f"the tool call cannot be read: {problem}")


def _deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper(item, levels - 1) for item in items)


def _read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """JSON value at `start`, and the index of its end.

    Growing windows keep the time linear: an error counts the lines of all of the text that was given to the decoder.
    """
    start, size = _skip(text, start), 1 << 12
    while True:
        window = text[start : start + size]
        try:
            value, end = _JSON.raw_decode(window)
            return value, start + end
        except json.JSONDecodeError as error:
            cut_off = error.msg.startswith("Unterminated") or error.pos > size - _LONGEST_TOKEN
            if len(window) < size or not cut_off:
                raise ValueError(f"invalid JSON, {error.msg} at character {error.pos}") from error
        except RecursionError as error:
            raise ValueError("the JSON is nested too deeply") from error
        size *= 8


def _skip(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    assert match
    return match.end()


def _expect(text: str, start: int, token: str) -> int:
    """Index of the end of the expected token, after optional white space."""
    start = _skip(text, start)
    if not text.startswith(token, start):
        raise ValueError(f"{token} is missing at character {start}")
    return start + len(token)


def _until(text: str, start: int, token: str) -> tuple[str, int]:
    """Text before the next occurrence of the token, and the index of the token's end."""
    end = text.find(token, start)
    if end < 0:
        raise ValueError(f"{token} is missing after character {start}")
    return text[start:end], end + len(token)


def _parameter(text: str, start: int) -> tuple[str, int]:
    """Text before `</parameter>`, and the index of that tag's end; the text may hold tags of calls, but none that
    follows a parameter."""
    end = _PARAMETER_TAG.search(text, start)
    if not end or end[0] != "</parameter>":
        raise ValueError(f"</parameter> is missing after character {start}")
    return text[start : end.start()], end.end()


def _convert(key: str, text: str, schema: Any) -> Any:
    """Value of a parameter written as bare text; without a declared type it is a string, list or object."""
    types = _declared(schema) or {"string", "object", "array"}
    word = text.strip().lower()
    try:
        value = _WORDS[word] if word in _WORDS else _whole_json(text)
    except ValueError:
        value = text
    if any(type(value) in _TYPES.get(name, ()) for name in types):
        return value
    if "string" in types:
        return text
    raise ValueError(f"parameter {key} is not of type {' or '.join(sorted(types))}")


def _declared(schema: Any) -> set[str]:
    if not isinstance(schema, dict):  # `true`: any value
        return {"string", *_TYPES}
    if "$ref" in schema:  # declared elsewhere, such as an enum
        return {"string", "object", "array"}
    kind = schema.get("type", [])
    types = {kind} if isinstance(kind, str) else set(kind)
    return types.union(*(_declared(option) for name in ("anyOf", "oneOf") for option in schema.get(name, [])))


def _whole_json(text: str) -> Any:
    value, end = _read_json(text)
    if _skip(text, end) != len(text):
        raise ValueError("more than one JSON value")
    return value


def _parse_python(text: str) -> ast.expr:
    """Syntax tree of an expression; nothing is executed."""
    if len(text) > MAX_PYTHON:
        raise ValueError(f"it is longer than {MAX_PYTHON} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences in strings
            return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(error.msg) from error
    except (MemoryError, RecursionError) as error:
        raise ValueError("it is nested too deeply") from error


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise ValueError("something in the list is not a call")
    if node.args:
        raise ValueError("arguments need their names")
    names, function = [], node.func
    while isinstance(function, ast.Attribute):
        names.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        raise ValueError("it has no valid name")
    name = ".".join([function.id, *reversed(names)])
    return _call(name, {_argument_name(argument): _literal(argument.value) for argument in node.keywords})


def _argument_name(argument: ast.keyword) -> str:
    if argument.arg is None:
        raise ValueError("arguments need their names")
    return argument.arg


def _literal(node: ast.expr | None) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values) if all(isinstance(_literal(key), str) for key in keys):
            return {_literal(key): _literal(item) for key, item in zip(keys, values, strict=True)}
    raise ValueError("arguments are numbers, strings, true, false, null, and lists and objects of them")
