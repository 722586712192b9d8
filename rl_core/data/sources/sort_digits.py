"""Generated problems: sort the digits of a line."""

from rl_core.config.data import SourceConfig
from rl_core.data.digits import digit_rows
from rl_core.data.rows import Row

SCORER = "exact"


def rows(config: SourceConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows of `difficulty` digits; the splits share no multiset of digits."""
    return digit_rows(config, seed, "sort_digits", "sorting", lambda line: "".join(sorted(line)))


def reference_response(row: Row) -> str:
    """The sorted digits."""
    answer: str = row["reward_model"]["ground_truth"]
    return answer
