"""Rules of the house that no linter here knows."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = [path for room in ("flows", "tasks", "rl_core") for path in sorted((ROOT / room).rglob("*.py"))]


def functions() -> Iterator[tuple[str, int]]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path}:{node.name}", (node.end_lineno or 0) - node.lineno + 1


def test_no_file_is_longer_than_400_lines() -> None:
    files = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]
    assert [str(path) for path in files if path.read_text().count("\n") > 400] == []


def test_no_function_is_longer_than_60_lines() -> None:
    assert [name for name, lines in functions() if lines > 60] == []


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert "make test" in (ROOT / ".ci/run").read_text()
    for command in ("make demo", "make test"):
        assert command in (ROOT / "README.md").read_text()
        subprocess.run(["make", "--dry-run", command.split()[1]], cwd=ROOT, check=True, capture_output=True)
