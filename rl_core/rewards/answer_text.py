"""Text of mathematical answers: cleaned before it is parsed, and refused if it would be misread or takes long."""

import math
import re

from antlr4 import InputStream
from latex2sympy2_extended.antlr_parser import PSLexer
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex

MAX_LENGTH = 500
"""Longest answer in characters."""
MAX_NESTING = 8
"""Deepest nesting of brackets; the parser takes 50 ms per level."""
MAX_FRACTIONS = 20
MAX_POWER = 10_000
"""Largest product of all whole exponents of an answer."""
MAX_EXPANSION = 12
"""Largest exponent of a sum with variables."""
_NORMAL = NormalizationConfig(basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_STYLE = (
    "begin end left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr displaystyle textstyle limits "
    "quad qquad therefore implies Rightarrow rightarrow to dots cdots ldots circ degree angle triangle"
)
_HARMLESS = frozenset(_STYLE.split())
"""Commands that the parser skips without a change of the value."""
_TEXT = r"\\(?:text|textbf|textrm|textit|mathrm|mbox)\s*\{[^{}]*\}"
_UNIT_POWER = re.compile(rf"({_TEXT})\s*\^\s*(?:\{{\s*-?\d\s*\}}|\d)")
_SPACE = re.compile(r"\\[,;:!]|\\quad(?![A-Za-z])|\\qquad(?![A-Za-z])|~")
_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,;:!]|~)(?=\d{3}(?!\d))")
_PLAIN_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])")
_PLAIN_POWER = re.compile(r"\*\*\s*(-?\d+)")
_FUNCTIONS = r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|exp|sqrt|and|gcd|lcm|max|min|mod|frac|inf|infinity|percent"
_WORD = rf"(?<![A-Za-z\\])(?!(?:{_FUNCTIONS})(?![A-Za-z]))[A-Za-z]{{3,}}"
_PROSE = re.compile(rf"\d[^\d]*?{_WORD}[^\d]*\d")
_TWO_NUMBERS = re.compile(r"\d\s+\d(?!\d*\s*/\s*\d)")
_BASE = re.compile(r"\d\s*_\s*\{?\s*(\d+)")
_EXPONENT = re.compile(r"(?:\^|\*\*)\s*[{(]?\s*[-+]?\s*([\d,.]+)")
_TOWER = re.compile(r"(?:\^|\*\*)\s*[-+]?(?:\d+|\w)\s*(?:\^|\*\*)|(?:\^|\*\*)\s*[({][^^*]*?\d[^^*]*?(?:\^|\*\*|!)")
_GROUP_EXPONENT = re.compile(r"[)}\]]\s*(?:\^|\*\*)\s*[{(]?\s*[-+]?\s*(\d+)")
_GROUP_FACTORIAL = re.compile(r"[)}\]!]\s*!")
_COSTLY = re.compile(r"\\(?:int|sum|prod|lim|begin\s*\{array)|(?<![A-Za-z])(?:eye|zeros|ones|diag|[hv]stack|svd|rref)")
_MIXED = re.compile(r"(\d+)\s+(\d+)\s*/\s*(\d+)")


class UnreadableAnswer(ValueError):
    """An answer beyond the limits within which it is parsed and compared."""


def cleaned(answer: str) -> str:
    """The content of a box without a final punctuation mark, spacing and powers of units; plain `pi`, `*` and `**` as
    LaTeX."""
    answer = _SPACE.sub(" ", _THOUSANDS.sub("", answer.strip()))
    answer = re.sub(r"(?<!\\)[.,;:\s]+$", "", answer)
    answer = _UNIT_POWER.sub(r"\1", answer)
    answer = _MIXED.sub(r"\1\\frac{\2}{\3}", answer)
    answer = _PLAIN_POWER.sub(r"^{\1}", _PLAIN_PI.sub(r"\\pi ", answer))
    return re.sub(r"(?<!\\)\*", r"\\cdot ", answer)


def check_size(answer: str, length: int = MAX_LENGTH) -> None:
    """Raises UnreadableAnswer if the answer is too long or nested, or has powers or factorials of large numbers."""
    nesting = deepest = 0
    for character in answer:
        nesting += (character in "([{") - (character in ")]}")
        deepest = max(deepest, nesting)
    groups = [int(number[:6]) for number in _GROUP_EXPONENT.findall(answer)]
    singles = [int(re.sub(r"\D", "", number)[:6] or 1) for number in _EXPONENT.findall(answer)]
    has_names = bool(re.search("[A-Za-z]", _COMMAND.sub("", answer)))
    factorials = answer.count("!")
    group_factorial = bool(_GROUP_FACTORIAL.search(answer)) and (factorials > 1 or "^" in answer or _large(answer, 3))
    limits = {
        f"more than {length} characters": len(answer) > length,
        f"more than {MAX_NESTING} nested brackets": deepest > MAX_NESTING,
        f"more than {MAX_FRACTIONS} fractions": answer.count("frac") > MAX_FRACTIONS,
        f"a power above {MAX_POWER}": max(singles, default=1) * math.prod(groups) > MAX_POWER,
        "a power in an exponent": bool(_TOWER.search(answer)),
        f"a sum to a power above {MAX_EXPANSION}": has_names and max(groups, default=0) > MAX_EXPANSION,
        "a large factorial or binomial": group_factorial
        or (_large(answer, 4) and bool(factorials or "binom" in answer or r"\choose" in answer)),
        "a sum, product, integral, limit or matrix function": bool(_COSTLY.search(answer)),
    }
    if found := next((limit for limit, exceeded in limits.items() if exceeded), None):
        raise UnreadableAnswer(f"the answer has {found}: {answer[:200]!r}")


def is_misread(answer: str, truth: str) -> bool:
    """Whether the parser would drop a part of the cleaned answer that changes its meaning: a command that it does not
    know, words between numbers, a second number, the base of a number, or the kind of brackets."""
    return (
        bool(_unknown_commands(answer) - _unknown_commands(truth))
        or bool(_PROSE.search(_COMMAND.sub(" ", answer)))
        or bool(_TWO_NUMBERS.search(answer))
        or (bool(_BASE.search(answer)) and _BASE.findall(answer) != _BASE.findall(truth))
        or {_brackets(answer), _brackets(truth)} == {"set", "tuple"}
    )


def _unknown_commands(text: str) -> set[str]:
    """LaTeX commands that the lexer does not read as one token, so that it skips them or reads another, shorter one."""
    text = str(normalize_latex(text, _NORMAL))
    lexer = PSLexer(InputStream(text))
    lexer.removeErrorListeners()
    ends = {token.start: token.stop + 1 for token in lexer.getAllTokens()}
    found = {match[0][1:] for match in _COMMAND.finditer(text) if ends.get(match.start(), 0) < match.end()}
    return found - _HARMLESS


def _brackets(text: str) -> str:
    """`set` for {…}, `tuple` for several elements in (…) or […], otherwise empty."""
    text = text.replace(r"\left", "").replace(r"\right", "").strip()
    if text.startswith((r"\{", r"\lbrace")) and text.endswith((r"\}", r"\rbrace")):
        return "set"
    return "tuple" if text[:1] in ("(", "[") and text[-1:] in (")", "]") and "," in text else ""


def _large(text: str, digits: int) -> bool:
    return bool(re.search(rf"\d{{{digits}}}", text))
