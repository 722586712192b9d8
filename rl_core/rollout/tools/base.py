"""What a tool is, and how a plain function becomes one; it imports nothing heavy, as tools run in small processes."""

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
"""Wrong arguments that one message names."""


@dataclass(frozen=True)
class ToolResult:
    """What a tool answers: the text for the policy, and a reward for the call."""

    text: str
    reward: float = 0.0


class ToolError(Exception):
    """What a tool raises to tell the policy in its own words why there is no answer."""


class BadArguments(Exception):
    """The arguments of a call do not fit the tool's schema; the message names them."""


class Tool:
    """Base of tools; one instance serves one trajectory.

    Every method runs in another process: the instance is pickled, sent there, and comes back changed when the call
    succeeds. A call that fails or is killed leaves it as it was. Methods may be asynchronous.
    """

    name: str = ""
    description: str = ""
    arguments: type[BaseModel] | None = None
    """Model of the arguments, which they are checked against; None when `schema` is written out and `execute` checks
    them itself."""

    def schema(self) -> dict[str, Any]:
        """The tool as an OpenAI function schema."""
        if self.arguments is None:
            raise TypeError("it has neither `arguments` nor a `schema` of its own")
        parameters = self.arguments.model_json_schema(schema_generator=_Untitled)
        for said in ("title", "description"):
            parameters.pop(said, None)
        empty: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
        return function_schema(self.name, self.description, empty | parameters)

    def parse(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments as `execute` wants them; raises BadArguments naming those that do not fit."""
        if self.arguments is None:
            return arguments
        try:
            parsed = self.arguments.model_validate_json(json.dumps(arguments), strict=True, extra="forbid")
        except ValidationError as error:
            raise BadArguments(_problems(error)) from None
        fields = type(parsed).model_fields
        return {fields[field].alias or field: getattr(parsed, field) for field in parsed.model_fields_set}

    def create(self, **kwargs: Any) -> None:
        """Called before the first turn, with the row's `create_kwargs`."""

    def execute(self, arguments: dict[str, Any], **kwargs: Any) -> ToolResult | str:
        """One call, with the row's `execute_kwargs`; raises ToolError with a message for the policy."""
        raise NotImplementedError

    def calc_reward(self, **kwargs: Any) -> float:
        """The reward after the last turn, with the row's `calc_reward_kwargs`."""
        return 0.0

    def release(self, **kwargs: Any) -> None:
        """Called at the end, whatever happened, with the row's `release_kwargs`."""


class FunctionTool(Tool):
    """A function as a tool: named and described as it is, with its parameters as arguments.

    A row's `execute_kwargs` are passed beside the arguments and win over them.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises TypeError naming the parameter that has no usable type hint."""
        self._function = function
        self.name = function.__name__
        self.description, self.arguments = _signature(function)

    def __reduce__(self) -> tuple[Any, ...]:
        return FunctionTool, (self._function,)  # the model of its arguments has no name to be found by

    def execute(self, arguments: dict[str, Any], **kwargs: Any) -> Any:
        """Calls the function."""
        return self._function(**{**arguments, **kwargs})


def tool(function: Function) -> Function:
    """Marks a function as a tool and checks at once that it has a schema; it can still be called as before.

    Name, description and arguments come from the function: its name, the first paragraph and the arguments' texts of
    its docstring, its type hints and defaults. Raises InputError naming the parameter without a usable type hint.
    """
    where = f"{function.__module__}:{function.__qualname__}"
    try:
        FunctionTool(function).schema()
    except Exception as error:  # pydantic has many ways to refuse a type
        raise unusable(where, error) from error
    return function


def unusable(where: str, error: Exception) -> InputError:
    """The error for a tool that has no schema."""
    seen = f"{type(error).__name__}: {error}"
    fix = "give every parameter a type hint of which JSON has values, or derive a class with `execute` from Tool"
    return InputError("a tool with a schema", seen, where, fix)


def function_schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """An OpenAI function schema."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class _Untitled(GenerateJsonSchema):
    """Titles only repeat the parameters' names, and every token of a schema is read in every conversation."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@functools.cache
def _signature(function: Callable[..., Any]) -> tuple[str, type[BaseModel]]:
    """Description and model of the arguments of a function."""
    hints = get_type_hints(function, include_extras=True)
    documented = docstring_parser.parse(inspect.getdoc(function) or "")
    texts = {parameter.arg_name: " ".join((parameter.description or "").split()) for parameter in documented.params}
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"parameter '{parameter}' cannot be given by name")
        if parameter.name not in hints:
            raise TypeError(f"parameter '{parameter.name}' has no type hint")
        default = ... if parameter.default is parameter.empty else parameter.default
        field = Field(default, alias=parameter.name, description=texts.get(parameter.name) or None)
        # Models have attributes of their own, such as `copy`, so fields are numbered and parameters are aliases.
        fields[f"argument_{number}"] = (hints[parameter.name], field)
    return _first_paragraph(documented), create_model(function.__name__, **fields)


def _first_paragraph(documented: docstring_parser.Docstring) -> str:
    further = None if documented.blank_after_short_description else documented.long_description
    paragraph = f"{documented.short_description or ''} {(further or '').split(PARAGRAPH)[0]}"
    return " ".join(paragraph.split())


def _problems(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    found = [f"argument '{'.'.join(map(str, problem['loc']))}': {problem['msg']}" for problem in problems]
    left_out = f"; and {len(found) - MAX_PROBLEMS} more" if len(found) > MAX_PROBLEMS else ""
    return "; ".join(found[:MAX_PROBLEMS]) + left_out
