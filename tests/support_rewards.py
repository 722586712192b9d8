"""A scorer of a user's own, found by its import path."""


def length(response: str, row: dict) -> float:
    """A tenth for each word, so that even an untrained model's rewards differ."""
    return len(response.split()) / 10


def named(response: str, row: dict) -> dict[str, float]:
    """The same score with two named rewards beside it."""
    words = response.split()
    return {"score": len(words) / 10, "kinds": len(set(words)) / 10, "short": float(len(words) < 4)}
