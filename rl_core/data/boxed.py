"""The `\\boxed{…}` that marks the answer in mathematical texts."""

BOX = "\\boxed{"
MAX_ANSWER = 1000
"""Maximum characters in a box."""


def in_box(answer: str) -> str:
    """The answer in a box."""
    return f"{BOX}{answer}}}"


def last_box(text: str) -> str | None:
    """Content of the last box; None if there is none or it is not closed within MAX_ANSWER characters."""
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
