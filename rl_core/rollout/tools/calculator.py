"""Calculator tool: exact evaluation of arithmetic expressions."""

import re
from collections.abc import Callable
from decimal import Context, Decimal, Inexact
from fractions import Fraction

from rl_core.rollout.tools.base import ToolError, tool

MAX_LENGTH = 1000
"""Maximum length of an expression in characters; it also bounds the size of intermediate numbers."""
MAX_DEPTH = 50
"""Maximum nesting depth of parentheses and signs."""
DIGITS = 20
"""Significant digits of a result without a finite decimal expansion."""
_TOKEN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+|[-+*/()])")


@tool
def calculator(x: str) -> str:
    """The exact value of an arithmetic expression of numbers, + - * / and parentheses.

    Args:
        x: The expression, such as (3 + 4.5) * 2.
    """
    return format_number(evaluate(x))


def evaluate(expression: str) -> Fraction:
    """Value of an expression; raises ToolError with the reason if it is invalid."""
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression is longer than {MAX_LENGTH} characters")
    parser = _Parser(_tokens(expression))
    value = parser.sum(0)
    if parser.next:
        raise ToolError(f"unexpected '{parser.next}'")
    return value


def format_number(value: Fraction) -> str:
    """The value as an integer or decimal; a non-terminating decimal is rounded to `DIGITS` significant digits."""
    numerator, denominator = Decimal(value.numerator), Decimal(value.denominator)
    try:
        quotient = Context(prec=5 * MAX_LENGTH, traps=[Inexact]).divide(numerator, denominator)
    except Inexact:
        quotient = Context(prec=DIGITS).divide(numerator, denominator)
    text = f"{quotient:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _tokens(expression: str) -> list[str]:
    tokens, position = [], 0
    text = expression.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ToolError(f"unexpected '{text[position:].lstrip()[0]}'; only numbers, + - * / ( and ) may be used")
        tokens.append(match[1])
        position = match.end()
    return tokens


class _Parser:
    """Recursive-descent parser: a sum of products of signed numbers and parentheses."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens[::-1]

    @property
    def next(self) -> str:
        return self._tokens[-1] if self._tokens else ""

    def sum(self, depth: int) -> Fraction:
        return self._chain("+-", self._product, depth)

    def _product(self, depth: int) -> Fraction:
        return self._chain("*/", self._factor, depth)

    def _chain(self, operators: str, part: Callable[[int], Fraction], depth: int) -> Fraction:
        value = part(depth)
        while self.next and self.next in operators:
            value = _apply(self._tokens.pop(), value, part(depth))
        return value

    def _factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ToolError(f"parentheses and signs are nested deeper than {MAX_DEPTH}")
        if not self.next:
            raise ToolError("the expression ends too early")
        token = self._tokens.pop()
        if token in "+-":
            value = self._factor(depth + 1)
            return -value if token == "-" else value
        if token == "(":
            value = self.sum(depth + 1)
            if self.next != ")":
                raise ToolError(f"expected ')', found '{self.next}'" if self.next else "a ')' is missing")
            self._tokens.pop()
            return value
        if token in "*/)":
            raise ToolError(f"unexpected '{token}'")
        return Fraction(token)


def _apply(operator: str, left: Fraction, right: Fraction) -> Fraction:
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    if right == 0:
        raise ToolError("division by zero")
    return left / right
