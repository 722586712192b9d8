"""The `\\boxed{…}` in which texts of mathematics give their answer."""

BOX = "\\boxed{"
MAX_ANSWER = 1000
"""Characters that a box may hold."""


def in_box(answer: str) -> str:
    """The answer in a box."""
    return f"{BOX}{answer}}}"


def last_box(text: str) -> str | None:
    """What the last box holds; None where there is none, or it is not closed within MAX_ANSWER characters."""
    start = text.rfind(BOX)
    if start < 0:
        return None
    inside, depth = text[start + len(BOX) :][: MAX_ANSWER + 1], 1
    for end, character in enumerate(inside):
        escaped = end > 0 and inside[end - 1] == "\\"
        depth += ((character == "{") - (character == "}")) * (not escaped)
        if depth == 0:
            return inside[:end]
    return None
