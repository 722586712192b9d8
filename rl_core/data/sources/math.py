"""Competition problems in the layout of MATH: `problem`, and `answer` or a `solution` that ends in a boxed one."""

from rl_core.config.schema import DataConfig
from rl_core.data.boxed import in_box, last_box
from rl_core.data.rows import Row, make_row
from rl_core.data.splits import read_split
from rl_core.errors import InputError

SCORER = "math"
INSTRUCTION = "Reason step by step and put the final answer in \\boxed{}."


def rows(config: DataConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """The first rows of the folder's two splits; the order is the files', so the seed changes nothing.

    Raises InputError when the files are missing or a row has another form.
    """
    if not config.path:
        fix = "give the folder that holds train.jsonl and test.jsonl: data.path=FOLDER"
        raise InputError("data.path", "none", "data.source=math", fix)
    path = config.path.rstrip("/")
    return _split(path, "train", "train", config.train_rows), _split(path, "test", "val", config.val_rows)


def reference_response(row: Row) -> str:
    """The data set's solution, or where it has none the answer in a box."""
    return row["extra_info"]["answer"]


def _split(path: str, name: str, split: str, count: int | None) -> list[Row]:
    return [_to_row(*found, split, index) for index, found in enumerate(read_split(path, name)[:count])]


def _to_row(record: Row, where: str, split: str, index: int) -> Row:
    problem, solution, answer = record.get("problem"), record.get("solution"), record.get("answer")
    if not isinstance(problem, str) or not problem.strip():
        raise InputError("a text `problem`", f"columns {sorted(record)}", where, "correct the row")
    box = last_box(solution) if isinstance(solution, str) else None
    truth = box if answer is None else str(answer)
    if not truth or not truth.strip():
        fix = "correct the row, or add its answer as `answer`"
        raise InputError("a `solution` with \\boxed{answer}, or an `answer`", f"columns {sorted(record)}", where, fix)
    reference = solution if isinstance(solution, str) and box == truth else in_box(truth)
    return make_row("math", f"{problem}\n{INSTRUCTION}", "math", truth, reference, split, index)
