"""The `Tool` interface and the `@tool` decorator; light imports only, because tools run in small processes."""

import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

import docstring_parser
from pydantic import BaseModel, Field, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from rl_core.errors import InputError

Function = TypeVar("Function", bound=Callable[..., Any])
PARAGRAPH = "\n\n"
MAX_PROBLEMS = 5
"""Maximum number of invalid arguments listed in one error message."""


@dataclass(frozen=True)
class ToolResult:
    """Result of a tool call: the text for the policy, and a reward for the call."""

    text: str
    reward: float = 0.0


class ToolError(Exception):
    """Raised by a tool to return a custom error message to the policy."""


class BadArguments(Exception):
    """The arguments of a call do not match the tool's schema; the message names them."""


class Tool:
    """Base class of tools; one instance per trajectory.

    Methods run in another process: the instance is pickled and sent there, and its new state is sent back if the call
    succeeds. A call that fails or is killed leaves the state unchanged. Methods may be asynchronous.
    """

    name: str = ""
    description: str = ""
    arguments: type[BaseModel] | None = None
    """Pydantic model that validates the arguments; None for a tool that overrides `schema` and validates them in
    `execute`."""

    def schema(self) -> dict[str, Any]:
        """OpenAI function schema of the tool."""
        if self.arguments is None:
            raise TypeError("the tool defines neither `arguments` nor `schema`")
        parameters = self.arguments.model_json_schema(schema_generator=_NoTitles)
        for key in ("title", "description"):
            parameters.pop(key, None)
        empty: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
        return function_schema(self.name, self.description, empty | parameters)

    def parse(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Validated arguments for `execute`; raises BadArguments naming the invalid ones."""
        if self.arguments is None:
            return arguments
        try:
            parsed = self.arguments.model_validate_json(json.dumps(arguments), strict=True, extra="forbid")
        except ValidationError as error:
            raise BadArguments(_problems(error)) from None
        fields = type(parsed).model_fields
        return {fields[field].alias or field: getattr(parsed, field) for field in parsed.model_fields_set}

    def create(self, **kwargs: Any) -> None:
        """Called before the first turn with the row's `create_kwargs`."""

    def execute(self, arguments: dict[str, Any], **kwargs: Any) -> ToolResult | str:
        """Runs one call, with the row's `execute_kwargs`; raises ToolError with a message for the policy."""
        raise NotImplementedError

    def calc_reward(self, **kwargs: Any) -> float:
        """Returns the reward after the last turn, with the row's `calc_reward_kwargs`."""
        return 0.0

    def release(self, **kwargs: Any) -> None:
        """Called at the end in every case, with the row's `release_kwargs`."""


class FunctionTool(Tool):
    """A function as a tool: its name, docstring and parameters become name, description and arguments.

    A row's `execute_kwargs` are passed with the arguments and take precedence over them.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises TypeError naming the parameter without a usable type hint."""
        self._function = function
        self.name = function.__name__
        self.description, self.arguments = _signature(function)

    def __reduce__(self) -> tuple[Any, ...]:
        return FunctionTool, (self._function,)  # the generated arguments model cannot be pickled by name

    def execute(self, arguments: dict[str, Any], **kwargs: Any) -> Any:
        """Calls the function."""
        return self._function(**{**arguments, **kwargs})


def tool(function: Function) -> Function:
    """Marks a function as a tool and validates its schema immediately; the function stays callable as usual.

    The schema comes from the function: its name, the first paragraph and argument descriptions of its docstring, its
    type hints and defaults. Raises InputError naming the parameter without a usable type hint.
    """
    where = f"{function.__module__}:{function.__qualname__}"
    try:
        FunctionTool(function).schema()
    except Exception as error:  # pydantic rejects types with many kinds of exceptions
        raise unusable(where, error) from error
    return function


def unusable(where: str, error: Exception) -> InputError:
    """Error for a tool without a usable schema."""
    seen = f"{type(error).__name__}: {error}"
    fix = "give every parameter a JSON-compatible type hint, or derive a class with `execute` from Tool"
    return InputError("a tool with a schema", seen, where, fix)


def function_schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """OpenAI function schema with these parameters."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class _NoTitles(GenerateJsonSchema):
    """Omits titles: they repeat the parameter names and cost tokens in every conversation."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@functools.cache
def _signature(function: Callable[..., Any]) -> tuple[str, type[BaseModel]]:
    """Description and arguments model of a function."""
    hints = get_type_hints(function, include_extras=True)
    documented = docstring_parser.parse(inspect.getdoc(function) or "")
    texts = {parameter.arg_name: " ".join((parameter.description or "").split()) for parameter in documented.params}
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"parameter '{parameter}' cannot be passed by name")
        if parameter.name not in hints:
            raise TypeError(f"parameter '{parameter.name}' has no type hint")
        default = ... if parameter.default is parameter.empty else parameter.default
        field = Field(default, alias=parameter.name, description=texts.get(parameter.name) or None)
        # A parameter may share its name with a BaseModel attribute such as `copy`: number the fields and use aliases.
        fields[f"argument_{number}"] = (hints[parameter.name], field)
    return _first_paragraph(documented), create_model(function.__name__, **fields)


def _first_paragraph(documented: docstring_parser.Docstring) -> str:
    continuation = None if documented.blank_after_short_description else documented.long_description
    paragraph = f"{documented.short_description or ''} {(continuation or '').split(PARAGRAPH)[0]}"
    return " ".join(paragraph.split())


def _problems(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    messages = [f"argument '{'.'.join(map(str, problem['loc']))}': {problem['msg']}" for problem in problems]
    omitted = f"; and {len(messages) - MAX_PROBLEMS} more" if len(messages) > MAX_PROBLEMS else ""
    return "; ".join(messages[:MAX_PROBLEMS]) + omitted
