"""A scorer of a user's own, found by its import path."""


def length(response: str, row: dict) -> float:
    """A tenth for each character, so that even an untrained model's rewards differ."""
    return len("".join(response.split())) / 10


def named(response: str, row: dict) -> dict[str, float]:
    """The same score with two named rewards beside it."""
    characters = "".join(response.split())
    return {
        "score": len(characters) / 10,
        "kinds": len(set(characters)) / 10,
        "short": float(len(characters) < 4),
    }
