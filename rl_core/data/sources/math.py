"""Competition problems in the layout of MATH: `problem`, and `answer` or a `solution` that ends in a boxed one."""

from collections.abc import Iterator

from rl_core.config.data import SourceConfig
from rl_core.data.boxed import in_box, last_box
from rl_core.data.rows import Found, Row, make_row, rows_of
from rl_core.data.splits import one_folder, read_split
from rl_core.errors import InputError

SCORER = "math"
INSTRUCTION = "Reason step by step and put the final answer in \\boxed{}."


def rows(config: SourceConfig, seed: int) -> tuple[Iterator[Found], Iterator[Found]]:
    """The first rows of the folder's two splits, in file order; the seed is not used.

    An invalid record gives an InputError in its place. Raises InputError if the files are missing.
    """
    path = one_folder(config)
    if not path:
        fix = "set data.path=FOLDER to the folder with train.jsonl and test.jsonl"
        raise InputError("data.path", "none", "data.source=math", fix)
    train, test = (read_split(path, name) for name in ("train", "test"))
    return rows_of(train, "train", config.train_rows, _to_row), rows_of(test, "val", config.val_rows, _to_row)


def reference_response(row: Row) -> str:
    """The data set's solution, or the boxed answer if there is none."""
    answer: str = row["extra_info"]["answer"]
    return answer


def _to_row(record: Row, split: str, index: int, where: str) -> Row:
    problem, solution, answer = record.get("problem"), record.get("solution"), record.get("answer")
    if not isinstance(problem, str) or not problem.strip():
        raise InputError("a string `problem`", f"columns {sorted(record)}", where, "correct the row")
    box = last_box(solution) if isinstance(solution, str) else None
    truth = box if answer is None else str(answer)
    if not truth or not truth.strip():
        fix = "correct the row, or add its answer as `answer`"
        raise InputError("a `solution` with \\boxed{answer}, or an `answer`", f"columns {sorted(record)}", where, fix)
    reference = solution if isinstance(solution, str) and box == truth else in_box(truth)
    return make_row("math", f"{problem}\n{INSTRUCTION}", "math", truth, reference, split, index)
