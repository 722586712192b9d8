"""Generated problems: copy the digits of a line."""

from rl_core.config.data import SourceConfig
from rl_core.data.digits import digit_rows
from rl_core.data.rows import Row

SCORER = "positions"


def rows(config: SourceConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows of `difficulty` digits; the splits share no multiset of digits."""
    return digit_rows(config, seed, "copy_digits", "copying", lambda line: line)


def reference_response(row: Row) -> str:
    """The same digits."""
    answer: str = row["reward_model"]["ground_truth"]
    return answer
