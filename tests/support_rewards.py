"""A scorer of a user's own, found by its import path."""


def length(response: str, row: dict) -> float:
    """A tenth for each word, so that even an untrained model's rewards differ."""
    return len(response.split()) / 10
