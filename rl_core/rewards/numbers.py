"""Numbers in text as exact fractions: signs, thousands separators, decimals, powers of ten, fractions, percentages."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 1000
"""Number of characters of a text in which numbers are searched; each of its numbers is shorter."""
MAX_POWER = 400
"""Largest power of ten, with either sign, of a number such as 1e400; one beyond it is not a number."""
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
# A sign between two values is an operator, not a sign. Every part matches in one way only, so backtracking is bounded.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]])(?P<sign>[-+\u2212]))?(?:\$(?P<inner>[-+\u2212]?))?(?:"
    rf"(?:(?P<whole>[0-9]+)[ ])?(?P<top>{_DIGITS})/(?P<bottom>{_DIGITS})(?!/|\.?[0-9])"
    rf"|(?P<digits>{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE](?P<power>[-+]?[0-9]+))?"
    r")(?P<percent>[ ]?\\?%)?"
)
# A number that is part of a power, fraction, ratio or time (10^3, 3.5/7, 12:30) is not the value of the whole.
_PART_BEFORE = re.compile(r"(?:[/^]|[\w)]\*\*|[0-9]:)$")
_PART_AFTER = re.compile(r"\s?(?:\^|\*\*[\w(]|[/:][0-9])")
_CUT_OFF = re.compile(r"[0-9]+(?:[.,/][0-9]+)*[.,/]?$")
_UNIT_POWER = re.compile(r"[A-Za-z}]\^\{?$")


@dataclass(frozen=True)
class Number:
    """An exact value; a percentage has the value before its sign: 50 for `50%`."""

    value: Fraction
    percent: bool = False

    def equals(self, other: "Number") -> bool:
        """Whether the values are equal; 50% equals 50 and 0.5, since a text may give the sign as a unit or not at
        all."""
        if self.value == other.value:
            return True
        if self.percent == other.percent:
            return False
        percent, plain = (self, other) if self.percent else (other, self)
        return percent.value / 100 == plain.value


def whole_number(text: str) -> Number | None:
    """The number that the text consists of; None for any other text, such as `5 of 8`, `3-5`, `10:30` or `10^3`."""
    text = text.strip().removesuffix(".")
    match = _NUMBER.fullmatch(text) if len(text) <= MAX_LENGTH else None
    return _value(match) if match else None


def first_number(text: str) -> Number | None:
    """The first number in the first MAX_LENGTH characters; None without one, or if it is part of an expression."""
    # Drop a number cut off by the end of the window: it would be read as a different number.
    window = text if len(text) <= MAX_LENGTH else _CUT_OFF.sub("", text[:MAX_LENGTH])
    match = next(_numbers(window), None)
    return _value(match) if match else None


def last_number(text: str) -> Number | None:
    """The last number in the last MAX_LENGTH characters; None without one, or if it is part of an expression."""
    window = text if len(text) <= MAX_LENGTH else text[-MAX_LENGTH:].lstrip("0123456789.,/")
    found = list(_numbers(window))
    return _value(found[-1]) if found else None


def _numbers(text: str) -> Iterator[re.Match[str]]:
    """All numbers but the powers of units, as in `13 cm^2`."""
    return (match for match in _NUMBER.finditer(text) if not _UNIT_POWER.search(text[: match.start()][-3:]))


def _value(match: re.Match[str]) -> Number | None:
    before, after = match.string[: match.start()][-3:], match.string[match.end() :][:4]
    if _PART_BEFORE.search(before) or _PART_AFTER.match(after):
        return None
    if match["top"]:
        bottom = _integer(match["bottom"])
        if not bottom:
            return None
        value = Fraction(_integer(match["top"]), bottom) + int(match["whole"] or 0)
    else:
        power = int(match["power"] or 0)
        if abs(power) > MAX_POWER:
            return None
        value = Fraction(match["digits"].replace(",", "")) * Fraction(10) ** power
    negative = (match["sign"] or match["inner"]) in ("-", "\u2212")
    return Number(-value if negative else value, bool(match["percent"]))


def _integer(digits: str) -> int:
    return int(digits.replace(",", ""))
